package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// clinic is a watcher, whose service has a consumer with two handlers. The handler "invoice" rejects values that begin with
// "bad", and fails with those that begin with "late" until it is repaired. All other values are in handled, with the name of the handler.
type clinic struct {
	*graveyard
	topic, group string
	member       *consumer.Consumer

	repaired atomic.Bool

	mu      sync.Mutex
	handled []string
}

func newClinic(t *testing.T) *clinic {
	t.Helper()
	g := newGraveyard(t, 0)
	return newClinicIn(g, g.outbox.Database())
}

// newClinicIn is newClinic with the watcher g. The consumer uses db.
func newClinicIn(g *graveyard, db *mongo.Database) *clinic {
	t := g.t
	t.Helper()
	c := &clinic{graveyard: g, topic: stacktest.Topic(t, 1), group: stacktest.Name(t)}
	member, err := consumer.New(c.group, db, consumer.WithBrokers(stacktest.Brokers(t)...),
		consumer.WithTopics(c.topic), consumer.WithCommitCount(1),
		consumer.WithErrorHook(func(context.Context, error) {}))
	if err != nil {
		t.Fatal(err)
	}
	retry := consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}, Min: time.Hour, Max: time.Hour})
	c.member = member
	for _, name := range []string{"invoice", "report"} {
		h := consumer.Func(func(_ context.Context, m *consumer.Message) error {
			if name == "invoice" && strings.HasPrefix(string(m.Value), "bad") {
				return consumer.Reject(errors.New("no such customer"))
			}
			if name == "invoice" && strings.HasPrefix(string(m.Value), "late") && !c.repaired.Load() {
				return errors.New("no response")
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			c.handled = append(c.handled, name+" "+string(m.Value))
			return nil
		}, "OrderPlaced")
		if err := member.Handle(name, h, retry); err != nil {
			t.Fatal(err)
		}
	}

	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- member.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return c
}

// publish writes records of a type. The value is also the id and the key.
func (c *clinic) publish(name string, values ...string) {
	c.t.Helper()
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	w := &kafka.Writer{
		Addr: kafka.TCP(stacktest.Brokers(c.t)...), Topic: c.topic, RequiredAcks: kafka.RequireAll, BatchTimeout: time.Millisecond, Transport: tr,
	}
	defer w.Close()

	for _, v := range values {
		err := w.WriteMessages(c.t.Context(), kafka.Message{Key: []byte(v), Value: []byte(v), Headers: []kafka.Header{
			{Key: "id", Value: []byte(v)}, {Key: "type", Value: []byte(name)},
		}})
		if err != nil {
			c.t.Fatal(err)
		}
	}
}

// untilHandled waits until all of these were handled, and checks that nothing else was.
func (c *clinic) untilHandled(want ...string) {
	c.t.Helper()
	stacktest.Eventually(c.t, "handled: "+strings.Join(want, ", "), func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.handled) >= len(want)
	})

	c.mu.Lock()
	defer c.mu.Unlock()
	slices.Sort(c.handled)
	slices.Sort(want)
	if !slices.Equal(c.handled, want) {
		c.t.Errorf("handled: got %q, want %q", c.handled, want)
	}
	c.handled = nil
}

// untilLetters waits until n letters are listed, and returns them.
func (c *clinic) untilLetters(n int) (page admin.Page[admin.DeadLetter]) {
	c.t.Helper()
	stacktest.Eventually(c.t, "dead letters of handlers", func() bool {
		page = admin.Page[admin.DeadLetter]{}
		c.runCommand(0, &page, "dead", "list", "--source", "handler")
		return len(page.Items) == n
	})
	return page
}

func TestLettersOfHandlersAreListedEditedAndRequeued(t *testing.T) {
	t.Parallel()
	c := newClinic(t)
	c.publish("OrderPlaced", "bad 1", "good", "bad 2", "bad 3")
	c.publish("Unheard", "parcel")
	c.untilHandled("report bad 1", "invoice good", "report good", "report bad 2", "report bad 3")

	page := c.untilLetters(4)
	byID := map[string]admin.DeadLetter{}
	for _, l := range page.Items {
		byID[l.ID] = l
	}
	if page.Total != 4 || byID["parcel"].Class != deadletter.ClassUnknown {
		t.Errorf("unexpected page %+v", page)
	}
	l := byID["bad 1"]
	if l.Source.Group != c.group || l.Source.Handler != "invoice" || l.Class != deadletter.ClassRejected || l.Topic != c.topic {
		t.Errorf("unexpected letter %+v", l)
	}
	if text := c.runCommand(0, nil, "dead", "list", "--source", "handler", "--limit", "3"); !strings.Contains(text, "3 of 4 dead letters") || !strings.Contains(text, "invoice") {
		t.Errorf("unexpected output:\n%s", text)
	} else {
		after := strings.TrimSpace(text[strings.Index(text, "--after ")+8:])
		var rest admin.Page[admin.DeadLetter]
		c.runCommand(0, &rest, "dead", "list", "--source", "handler", "--after", after)
		if len(rest.Items) != 1 || rest.Items[0].ID != page.Items[3].ID {
			t.Errorf("after the first page: got %+v", rest.Items)
		}
	}
	if text := c.runCommand(0, nil, "dead", "list"); !strings.Contains(text, "4 of 4 dead letters") && !strings.Contains(text, "handler invoice of "+c.group) {
		t.Errorf("letters of both kinds:\n%s", text)
	}
	if text := c.runCommand(0, nil, "dead", "list", "--source", "relay"); !strings.HasPrefix(text, "no dead letter matches") {
		t.Errorf("letters of the relay:\n%s", text)
	}
	if text := c.runCommand(0, nil, "dead", "summary"); !strings.Contains(text, "handler invoice") || !strings.Contains(text, "rejected") || !strings.Contains(text, "no such customer") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := c.runCommand(0, nil, "dead", "show", "bad 1", "--payload"); !strings.Contains(text, "no such customer") || !strings.Contains(text, "handler invoice of group "+c.group) || !strings.Contains(text, c.topic+"/0@") || !strings.Contains(text, `"payload": "bad 1"`) ||
		strings.Contains(text, "\naggregate ") {
		t.Errorf("unexpected output:\n%s", text)
	}

	// Edit: only the handler that gave up gets the message, with the new payload.
	file := filepath.Join(t.TempDir(), "payload")
	if err := os.WriteFile(file, []byte("fixed"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.runCommand(0, nil, "dead", "edit", "bad 1", "--source", "handler", "--version", "0", "--payload", file, "--yes")
	c.untilHandled("invoice fixed")
	c.runCommand(1, nil, "dead", "edit", "bad 1", "--source", "handler", "--version", "0", "--payload", file, "--yes")

	// Requeue: it fails again, and this is another letter.
	c.runCommand(0, nil, "dead", "requeue", "--source", "handler", "--handler", "invoice", "bad 2", "--yes")
	stacktest.Eventually(t, "another letter of bad 2", func() bool {
		var got admin.Page[admin.DeadLetter]
		c.runCommand(0, &got, "dead", "list", "--source", "handler", "bad 2")
		return len(got.Items) == 2 && got.Items[0].Delivery == 1 && got.Items[1].Requeued != nil && !got.Items[1].Waiting
	})

	// A letter without a handler needs the name of one.
	if text := c.runCommand(1, nil, "dead", "requeue", "--source", "handler", "--class", "unknown", "--yes"); !strings.Contains(text, "name the handler") {
		t.Errorf("unexpected output:\n%s", text)
	}
	// A handler of another type does not get the message.
	c.runCommand(0, nil, "dead", "requeue", "--source", "handler", "--class", "unknown", "--to", "report", "--yes")
	stacktest.Eventually(t, "another letter of the parcel", func() bool {
		var got admin.Page[admin.DeadLetter]
		c.runCommand(0, &got, "dead", "list", "--source", "handler", "parcel")
		return len(got.Items) == 2 && strings.Contains(got.Items[0].Reason, "handler report does not take type")
	})

	var gone admin.DeadDiscarded
	c.runCommand(0, &gone, "dead", "discard", "--source", "handler", "--group", c.group, "--yes")
	if gone.Discarded != 6 {
		t.Errorf("discarded %+v, want 6", gone)
	}
	c.runCommand(1, nil, "dead", "discard", "--source", "handler", "--yes")
	if text := c.runCommand(0, nil, "dead", "list", "--source", "handler", "--archived"); !strings.Contains(text, "6 of 6 dead letters") {
		t.Errorf("the archive:\n%s", text)
	}
	c.runCommand(0, nil, "dead", "discard", "--source", "handler", "--archived", "--all", "--yes")
	c.runCommand(0, nil, "dead", "list", "--handler", "invoice")
	c.runCommand(1, nil, "dead", "list", "--source", "relay", "--handler", "invoice")
	if n, err := c.outbox.Database().Collection(deadletter.DefaultCollection).CountDocuments(t.Context(), bson.D{}); n != 0 || err != nil {
		t.Errorf("letters after the discard: %d, %v", n, err)
	}
}
