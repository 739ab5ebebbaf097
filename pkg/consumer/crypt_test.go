package consumer_test

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

func key(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }

func keys(t testing.TB, current string, all map[string][]byte) consumer.Keys {
	t.Helper()
	k, err := consumer.StaticKeys(current, all)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// emitted is the event as a consumer gets it, after middlewares.
func emitted(t testing.TB, ev event.Event, mws ...consumer.EmitMiddleware) *consumer.Message {
	t.Helper()
	var out published
	e, err := consumer.NewEmitter(&fakeBox{}, consumer.EmitDirect(&out, func(event.Event) string { return "t" }), consumer.EmitVia(mws...))
	if err != nil {
		t.Fatal(err)
	}
	if err := e.PublishDirect(context.Background(), ev); err != nil {
		t.Fatal(err)
	}
	m := out.list["t"][0]
	got, err := consumer.Decode(&consumer.Record{Topic: "t", Key: m.Key, Value: m.Value, Headers: m.Headers})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// handled is what a handler inside of the middlewares gets.
func handled(ctx context.Context, m *consumer.Message, mws ...consumer.Middleware) (got *consumer.Message, err error) {
	var c consumer.Chain
	c.Use(mws...)
	err = c.Middleware()(consumer.HandlerFunc(func(_ context.Context, m *consumer.Message) error { got = m; return nil })).Handle(ctx, m)
	return got, err
}

func TestEncryptedBodiesAreReadByHandlersAlone(t *testing.T) {
	t.Parallel()
	k := keys(t, "k1", map[string][]byte{"k1": key(1)})
	rapid.Check(t, func(rt *rapid.T) {
		body := rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(rt, "body")
		ev := event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", body), event.WithHeader("tenant", []byte("x")))
		m := emitted(t, ev, consumer.Encrypt(k, "tenant", "absent"))
		if len(m.Value) != len(body)+28 || len(body) > 8 && bytes.Contains(m.Value, body) {
			rt.Fatalf("%d bytes became %d", len(body), len(m.Value))
		}
		before := bytes.Clone(m.Value)
		got, err := handled(t.Context(), m, consumer.Decrypt(k))
		if err != nil || !bytes.Equal(got.Value, body) {
			rt.Fatalf("decrypted to something else: %v", err)
		}
		if !bytes.Equal(m.Value, before) || got == m {
			rt.Fatal("the message itself was decrypted: retry topics would have it in plain")
		}
	})
}

func TestWhatWasChangedIsNotDecrypted(t *testing.T) {
	t.Parallel()
	k := keys(t, "k1", map[string][]byte{"k1": key(1), "k2": key(2)})
	fresh := func() *consumer.Message {
		return emitted(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte("secret")), event.WithHeader("tenant", []byte("x"))), consumer.Encrypt(k, "tenant"))
	}
	for name, change := range map[string]func(m *consumer.Message){
		"body": func(m *consumer.Message) {
			m.Value = append(bytes.Clone(m.Value[:len(m.Value)-1]), m.Value[len(m.Value)-1]^1)
		},
		"short body":      func(m *consumer.Message) { m.Value = m.Value[:5] },
		"id":              func(m *consumer.Message) { m.ID = "another" },
		"type":            func(m *consumer.Message) { m.Type = "B" },
		"type and header": func(m *consumer.Message) { m.Type = "B"; m.SetHeader("encryption-type", []byte("B")) },
		"header":          func(m *consumer.Message) { m.SetHeader("tenant", []byte("y")) },
		"header gone":     func(m *consumer.Message) { m.DeleteHeader("tenant") },
		"another key":     func(m *consumer.Message) { m.SetHeader("encryption", []byte("1;aes-gcm;k2;tenant")) },
		"unknown key":     func(m *consumer.Message) { m.SetHeader("encryption", []byte("1;aes-gcm;k9;tenant")) },
		"fewer headers":   func(m *consumer.Message) { m.SetHeader("encryption", []byte("1;aes-gcm;k1")) },
		"unknown kind":    func(m *consumer.Message) { m.SetHeader("encryption", []byte("2;rot13;k1")) },
		"not encrypted":   func(m *consumer.Message) { m.DeleteHeader("encryption") },
	} {
		m := fresh()
		change(m)
		got, err := handled(t.Context(), m, consumer.Decrypt(k))
		if !errors.Is(err, consumer.ErrValidation) || got != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := handled(t.Context(), fresh(), consumer.Decrypt(k)); err != nil {
		t.Errorf("unchanged: %v", err)
	}
}

func TestKeysRotate(t *testing.T) {
	t.Parallel()
	old := keys(t, "k1", map[string][]byte{"k1": key(1)})
	both := keys(t, "k2", map[string][]byte{"k1": key(1), "k2": key(2)})
	ev := event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte("secret")))
	for name, m := range map[string]*consumer.Message{"old": emitted(t, ev, consumer.Encrypt(old)), "new": emitted(t, ev, consumer.Encrypt(both))} {
		if got, err := handled(t.Context(), m, consumer.Decrypt(both)); err != nil || string(got.Value) != "secret" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := handled(t.Context(), emitted(t, ev, consumer.Encrypt(both)), consumer.Decrypt(old)); !errors.Is(err, consumer.ErrUnknownKey) {
		t.Errorf("a key that is not there: %v", err)
	}
}

func TestWhatNeedsNoDecryption(t *testing.T) {
	t.Parallel()
	k := keys(t, "k1", map[string][]byte{"k1": key(1)})
	tombstone := emitted(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Payload{}), consumer.Encrypt(k))
	if got, err := handled(t.Context(), tombstone, consumer.Decrypt(k)); err != nil || !got.Tombstone() {
		t.Errorf("a tombstone: %v", err)
	}
	plain := emitted(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte("open"))))
	if got, err := handled(t.Context(), plain, consumer.Decrypt(k, consumer.AllowPlain())); err != nil || string(got.Value) != "open" {
		t.Errorf("a plain one that is allowed: %v", err)
	}
}

type awayKeys struct{ consumer.Keys }

func (awayKeys) Key(context.Context, string) ([]byte, error) { return nil, errFlaky }

func TestAKeyProviderThatIsAwayIsNotTheMessagesFault(t *testing.T) {
	t.Parallel()
	k := keys(t, "k1", map[string][]byte{"k1": key(1)})
	_, err := handled(t.Context(), emitted(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte("x"))), consumer.Encrypt(k)), consumer.Decrypt(awayKeys{k}))
	if !errors.Is(err, errFlaky) || errors.Is(err, consumer.ErrValidation) {
		t.Error(err)
	}
}

func TestBrokenKeysAreRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		current string
		all     map[string][]byte
	}{
		{"k", nil}, {"k", map[string][]byte{"k": make([]byte, 31)}}, {"a;b", map[string][]byte{"a;b": key(1)}}, {"", map[string][]byte{"": key(1)}},
	} {
		if _, err := consumer.StaticKeys(c.current, c.all); !errors.Is(err, consumer.ErrConfiguration) {
			t.Errorf("%q, %d keys: %v", c.current, len(c.all), err)
		}
	}
}
