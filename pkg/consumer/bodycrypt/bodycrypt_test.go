package bodycrypt_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/bodycrypt"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func newKey(id string) bodycrypt.Key {
	return bodycrypt.Key{ID: id, Bytes: bytes.Repeat([]byte(id[len(id)-1:]), 32)}
}

func newKeys(t testing.TB, current string, old ...string) bodycrypt.Keys {
	t.Helper()
	var olds []bodycrypt.Key
	for _, id := range old {
		olds = append(olds, newKey(id))
	}
	k, err := bodycrypt.Static(newKey(current), olds...)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// emitEvent returns the event as a consumer receives it, after the middlewares.
func emitEvent(t testing.TB, ev event.Event, mws ...outbox.Middleware) *consumer.Message {
	t.Helper()
	var out event.Event
	emit := outbox.AppendFunc(func(_ context.Context, ev event.Event) error { out = ev; return nil })
	for _, mw := range slices.Backward(mws) {
		emit = mw(emit)
	}
	if err := emit(context.Background(), ev); err != nil {
		t.Fatal(err)
	}

	body, err := out.Payload()
	if err != nil {
		t.Fatal(err)
	}
	m := &consumer.Message{ID: out.ID().String(), Name: out.Name(), Key: []byte(out.Key()), Value: body}
	for _, h := range out.Headers() {
		m.Headers = append(m.Headers, event.Header(h))
	}
	return m
}

// handleWith returns the message that a handler inside of the middleware receives.
func handleWith(ctx context.Context, m *consumer.Message, mw consumer.Middleware) (got *consumer.Message, err error) {
	err = mw(func(_ context.Context, m *consumer.Message) error { got = m; return nil })(ctx, m)
	return got, err
}

func TestEncryptedBodiesAreReadByHandlersAlone(t *testing.T) {
	t.Parallel()
	k := newKeys(t, "k1")
	rapid.Check(t, func(rt *rapid.T) {
		body := rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(rt, "body")
		ev := event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", body), event.WithHeader("tenant", []byte("x")))
		m := emitEvent(t, ev, bodycrypt.Encrypt(k, "tenant", "absent"))

		if len(m.Value) != len(body)+28 || len(body) > 8 && bytes.Contains(m.Value, body) {
			rt.Fatalf("%d bytes became %d", len(body), len(m.Value))
		}

		before := bytes.Clone(m.Value)
		got, err := handleWith(t.Context(), m, bodycrypt.Decrypt(k))
		if err != nil || !bytes.Equal(got.Value, body) {
			rt.Fatalf("decrypted to something else: %v", err)
		}

		if !bytes.Equal(m.Value, before) || got == m {
			rt.Fatal("the message itself was decrypted: retry topics would have it in plain")
		}
	})
}

// Presets write the id of an event, its type and its body in several forms.
func TestRecordsOfEveryPresetAreDecrypted(t *testing.T) {
	t.Parallel()
	k := newKeys(t, "k1")
	uuidText := uuid.NewString()

	for name, cfg := range map[string]routing.PresetConfig{
		"typed": {Name: routing.Typed}, "debezium": {Name: routing.Debezium}, "connector": {Name: routing.Connector}, "plain": {Name: routing.Plain},
		"cloudevents": {Name: routing.CloudEvents}, "structured": {Name: routing.CloudEvents, Structured: true},
	} {
		for _, id := range []event.ID{
			event.NewID(uuid.New()), event.NewID(bson.NewObjectID()), event.NewID("o-1"), event.NewID(uuidText),
			event.NewID(strings.ToUpper(uuidText)), event.NewID("AAECAwQFBgcICQoLDA0ODw=="),
		} {
			ev := event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte("secret")), event.WithID(id), event.WithHeader("tenant", []byte("x")))
			m := relayEvent(t, cfg, ev, bodycrypt.Encrypt(k))
			got, err := handleWith(t.Context(), m, bodycrypt.Decrypt(k))
			if err != nil || string(got.Value) != "secret" {
				t.Errorf("%s, id %s: %v", name, id, err)
			}
		}
	}
}

// relayEvent returns the message that a consumer decodes from the record that the relay makes of an encrypted event.
func relayEvent(t *testing.T, cfg routing.PresetConfig, ev event.Event, encrypt outbox.Middleware) *consumer.Message {
	t.Helper()
	var doc []byte
	err := encrypt(func(_ context.Context, ev event.Event) (err error) {
		doc, err = bson.Marshal(ev)
		return err
	})(t.Context(), ev)
	if err != nil {
		t.Fatal(err)
	}
	var view envelope.View
	if err := envelope.Parse(doc, &view); err != nil {
		t.Fatal(err)
	}

	preset, err := routing.NewPreset(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var rec record.Record
	meta := routing.Meta{DB: []byte("db"), Coll: []byte("outbox")}
	if err := preset.Filler().Fill(&view, &meta, routing.Target{Topic: "topic"}, &rec); err != nil {
		t.Fatal(err)
	}

	m := &consumer.Message{Topic: rec.Topic, Key: rec.Key, Value: rec.Value}
	for _, h := range rec.Headers {
		m.Headers = append(m.Headers, event.Header{Key: string(h.Key), Value: h.Value})
	}
	if err := consumer.Decode(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	return m
}

func TestChangedMessagesAreNotDecrypted(t *testing.T) {
	t.Parallel()
	k := newKeys(t, "k1", "k2")
	fresh := func() *consumer.Message {
		return emitEvent(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte("secret")), event.WithHeader("tenant", []byte("x"))), bodycrypt.Encrypt(k, "tenant"))
	}

	for name, change := range map[string]func(m *consumer.Message){
		"body": func(m *consumer.Message) {
			m.Value = append(bytes.Clone(m.Value[:len(m.Value)-1]), m.Value[len(m.Value)-1]^1)
		},
		"short body":      func(m *consumer.Message) { m.Value = m.Value[:5] },
		"id":              func(m *consumer.Message) { m.ID = "another" },
		"type":            func(m *consumer.Message) { m.Name = "B" },
		"type and header": func(m *consumer.Message) { m.Name = "B"; m.SetHeader("encryption-type", []byte("B")) },
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
		got, err := handleWith(t.Context(), m, bodycrypt.Decrypt(k))
		if !errors.Is(err, consumer.ErrMalformed) || got != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := handleWith(t.Context(), fresh(), bodycrypt.Decrypt(k)); err != nil {
		t.Errorf("unchanged: %v", err)
	}
}

func TestKeysRotate(t *testing.T) {
	t.Parallel()
	old := newKeys(t, "k1")
	both := newKeys(t, "k2", "k1")
	ev := event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte("secret")))
	for name, m := range map[string]*consumer.Message{"old": emitEvent(t, ev, bodycrypt.Encrypt(old)), "new": emitEvent(t, ev, bodycrypt.Encrypt(both))} {
		if got, err := handleWith(t.Context(), m, bodycrypt.Decrypt(both)); err != nil || string(got.Value) != "secret" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := handleWith(t.Context(), emitEvent(t, ev, bodycrypt.Encrypt(both)), bodycrypt.Decrypt(old)); !errors.Is(err, bodycrypt.ErrUnknownKey) {
		t.Errorf("a key that is not there: %v", err)
	}
}

func TestPlainMessagesNeedNoDecryption(t *testing.T) {
	t.Parallel()
	k := newKeys(t, "k1")
	tombstone := emitEvent(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Payload{}), bodycrypt.Encrypt(k))
	if got, err := handleWith(t.Context(), tombstone, bodycrypt.Decrypt(k)); err != nil || !got.Tombstone() {
		t.Errorf("a tombstone: %v", err)
	}
	plain := emitEvent(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte("open"))))
	if got, err := handleWith(t.Context(), plain, bodycrypt.Decrypt(k, bodycrypt.WithPlain())); err != nil || string(got.Value) != "open" {
		t.Errorf("a plain one that is allowed: %v", err)
	}
}

type awayKeys struct{ bodycrypt.Keys }

var errAway = errors.New("the key service is away")

func (awayKeys) Key(context.Context, string) (bodycrypt.Key, error) {
	return bodycrypt.Key{}, errAway
}

func TestAKeyProviderThatIsAwayIsNotTheMessagesFault(t *testing.T) {
	t.Parallel()
	k := newKeys(t, "k1")
	_, err := handleWith(t.Context(), emitEvent(t, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte("x"))), bodycrypt.Encrypt(k)), bodycrypt.Decrypt(awayKeys{k}))
	if !errors.Is(err, errAway) || errors.Is(err, consumer.ErrMalformed) {
		t.Error(err)
	}
}

func TestBrokenKeysAreRejected(t *testing.T) {
	t.Parallel()
	_, err := bodycrypt.Static(bodycrypt.Key{ID: "short", Bytes: make([]byte, 31)}, newKey("a;b"), newKey("k"), newKey("k"), bodycrypt.Key{})
	for _, want := range []string{`"short" has 31 bytes`, `"a;b"`, `two keys have the id "k"`, `invalid key id ""`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
