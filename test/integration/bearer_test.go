//go:build unix

package integration

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/bearer"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/franz"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

const (
	tokenLife = 10 * time.Second
	// sessionLife is how long the broker accepts a login. It closes the connection at the next request after it.
	sessionLife = 5 * time.Second
	// expiries is how many sessions of a connection end during the test.
	expiries = 3
)

// rotatedToken is a file with a token that is replaced before it expires.
type rotatedToken struct {
	t    *testing.T
	path string
	stop func() // leaves the last token in the file
}

func rotateToken(t *testing.T, user string) *rotatedToken {
	t.Helper()
	r := &rotatedToken{t: t, path: filepath.Join(t.TempDir(), "token")}
	r.write(devstack.UnsecuredToken(user, tokenLife))

	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var group sync.WaitGroup
	group.Go(func() {
		tick := time.NewTicker(tokenLife / 4)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				r.write(devstack.UnsecuredToken(user, tokenLife))
			case <-ctx.Done():
				return
			}
		}
	})
	r.stop = func() { cancel(); group.Wait() }
	t.Cleanup(r.stop)
	return r
}

// write replaces the file at once, as Kubernetes does.
func (r *rotatedToken) write(token string) {
	next := r.path + ".next"
	if err := errors.Join(os.WriteFile(next, []byte(token+"\n"), 0o600), os.Rename(next, r.path)); err != nil {
		r.t.Error(err)
	}
}

// Logins by token expire several times while events are sent and handled, and neither is lost or repeated. When the tokens end,
// the log names the reason, and when they come back, everything follows.
func TestTokensAreRenewedWhileEventsFlow(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Brokers: 1, Quick: true, Kafka: devstack.KafkaOptions{
		Users: []devstack.User{{Name: "admin", Password: rolePassword}}, OAuth: true, Sessions: sessionLife,
	}})
	brokers, err := stack.BrokersOn(devstack.SASL)
	if err != nil {
		t.Fatal(err)
	}
	file := rotateToken(t, "relay")
	s := kit.New(t, kit.Options{Stack: stack, Brokers: brokers, Set: map[string]any{
		"kafka.sasl": map[string]any{"mechanism": "oauthbearer", "token": map[string]any{"file": file.path}},
	}})
	s.SetConfig("topics.create.partitions", 3)
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()

	server := newTokenServer(t, "shipping")
	login := consumer.SASL{Mechanism: "oauthbearer", Token: bearer.FromClientCredentials(bearer.ClientCredentials{
		TokenURL: server.URL, ClientID: "shipping", ClientSecret: "secret",
	})}
	members := map[string]*tokenReader{
		"kafka-go": readWithToken(t, s, brokers, "by-kafka-go", consumer.WithSASL(login)),
		"franz":    readWithToken(t, s, brokers, "by-franz", consumer.WithSASL(login), franz.Use()),
	}

	var sent int
	send := func() {
		t.Helper()
		for range 20 {
			sent++
			s.AppendEvents(s.Outbox(), event.New(event.Aggregate{Type: "order", ID: fmt.Sprint(sent % 7)}, "Placed", event.JSON(sent), event.WithID(fmt.Sprint("e-", sent))))
		}
	}
	for end := time.Now().Add(expiries * sessionLife); time.Now().Before(end); <-time.After(100 * time.Millisecond) {
		send()
	}
	s.CheckDelivery(topics)
	for name, m := range members {
		m.waitHandled(name, sent)
	}
	if n := server.requests.Load(); n < 2 {
		t.Errorf("the consumers requested %d tokens, want some", n)
	}
	// The last token expires.
	file.stop()
	stacktest.EventuallyIn(t, kit.Patience, "the relay reports that the broker rejects its token", func() bool {
		send()
		return strings.Contains(p.ReadLog(), "the broker rejects the token")
	}, func() any { return p.ReadLog() })
	code, out, errOut := s.RunCommand("doctor")
	if text := out + errOut; code == 0 || !strings.Contains(text, "the broker rejects the token") || !strings.Contains(text, "has not expired") {
		t.Errorf("doctor: exit code %d\n%s", code, text)
	}
	file.write("")
	if _, out, errOut := s.RunCommand("doctor"); !strings.Contains(out+errOut, "there is no token") || !strings.Contains(out+errOut, "kafka.sasl.token") {
		t.Errorf("doctor without a token:\n%s%s", out, errOut)
	}

	file.write(devstack.UnsecuredToken("relay", time.Hour))
	s.CheckDelivery(topics)
	for name, m := range members {
		m.waitHandled(name, sent)
	}
}

// tokenServer is an authorization server whose tokens are for one user.
type tokenServer struct {
	*httptest.Server
	requests atomic.Int32
}

func newTokenServer(t *testing.T, user string) *tokenServer {
	t.Helper()
	s := &tokenServer{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		s.requests.Add(1)
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"access_token":%q,"token_type":"Bearer","expires_in":%d}`, devstack.UnsecuredToken(user, tokenLife), int(tokenLife.Seconds()))
	}))
	t.Cleanup(s.Close)
	return s
}

// tokenReader is a consumer whose handler stores the ids of its events. It may run again for an event if MongoDB rolls its transaction
// back, so only the stored ids count.
type tokenReader struct {
	t       *testing.T
	handled *mongo.Collection
}

func readWithToken(t *testing.T, s *kit.Scene, brokers []string, group string, opts ...consumer.Option) *tokenReader {
	t.Helper()
	r := &tokenReader{t: t, handled: s.DB.Collection("handled-" + group)}
	c, err := consumer.New(group, s.DB, append([]consumer.Option{
		consumer.WithBrokers(brokers...), consumer.WithTopics(s.TopicOf("order")),
	}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Handle("count", consumer.Func(func(ctx context.Context, m *consumer.Message) error {
		_, err := r.handled.InsertOne(ctx, bson.D{{Key: "of", Value: m.ID}})
		return err
	}, "*")); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return r
}

func (r *tokenReader) waitHandled(name string, n int) {
	r.t.Helper()
	// readTimes returns how often each event was handled.
	readTimes := func() map[string]int {
		var list []struct{ Of string }
		cursor, err := r.handled.Find(r.t.Context(), bson.D{})
		if err == nil {
			err = cursor.All(r.t.Context(), &list)
		}
		if err != nil {
			r.t.Error(err)
		}

		times := map[string]int{}
		for _, document := range list {
			times[document.Of]++
		}
		return times
	}

	stacktest.EventuallyIn(r.t, kit.Patience, fmt.Sprintf("%s handles %d events", name, n), func() bool { return len(readTimes()) >= n }, func() any { return len(readTimes()) })
	for id, n := range readTimes() {
		if n != 1 {
			r.t.Errorf("%s handled %s %d times", name, id, n)
		}
	}
}
