package consumer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// logbook collects the lines of a consumer.
type logbook struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *logbook) Write(line []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(line)
}

// all returns the lines with that beginning of their message.
func (b *logbook) all(t *testing.T, message string) (lines []map[string]any) {
	t.Helper()
	for line := range strings.Lines(b.read()) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(fields["msg"].(string), message) {
			lines = append(lines, fields)
		}
	}
	return lines
}

// find returns the first line with that beginning of its message, or nil.
func (b *logbook) find(t *testing.T, message string) map[string]any {
	t.Helper()
	if lines := b.all(t, message); len(lines) > 0 {
		return lines[0]
	}
	return nil
}

// last returns the last line with that beginning of its message, or nil.
func (b *logbook) last(t *testing.T, message string) map[string]any {
	t.Helper()
	if lines := b.all(t, message); len(lines) > 0 {
		return lines[len(lines)-1]
	}
	return nil
}

// count returns the number of lines with that beginning of their message.
func (b *logbook) count(t *testing.T, message string) int {
	t.Helper()
	return len(b.all(t, message))
}

// read returns all lines.
func (b *logbook) read() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// newLogged returns a consumer that writes to the book, with a handler.
func (k *kit) newLogged(t *testing.T, book *logbook, opts ...consumer.Option) *consumer.Consumer {
	t.Helper()
	opts = append([]consumer.Option{consumer.WithErrorHook(nil), consumer.WithLogger(slog.New(slog.NewJSONHandler(book, nil)))}, opts...)
	c := k.newConsumer(opts...)
	addHandler(t, c, "counted", func(_ context.Context, m *consumer.Message) error {
		if string(m.Value) == "planted" {
			return consumer.Reject(errors.New("no such customer"))
		}
		return nil
	})
	return c
}

func TestTheLogShowsTheLifeOfAMember(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	first, second := &logbook{}, &logbook{}
	stop := k.start(k.newLogged(t, first))
	k.publish(newMessage("a", "counted", "0"), &consumer.Message{Key: []byte("secret"), Value: []byte("planted"), Headers: []event.Header{
		{Key: "id", Value: []byte("m1")}, {Key: "type", Value: []byte("counted")},
	}})
	k.untilLetters(1)
	k.publish(newMessage("a", "unheard", "0"))
	k.untilLetters(2)
	if n := first.count(t, "message is given up; it is a dead letter now"); n != 2 {
		t.Errorf("%d lines about dead letters, want 2, one of a type that no handler takes:\n%s", n, first.read())
	}

	// The second member gets none of the one partition.
	k.start(k.newLogged(t, second))
	const idle = "no partition is assigned"
	k.waitUntil("a member without a partition", func(context.Context) bool {
		return first.find(t, idle) != nil || second.find(t, idle) != nil
	})
	stop()

	letter := first.find(t, "message is given up; it is a dead letter now")
	for field, want := range map[string]any{
		"level": "ERROR", "group": k.group, "handler": "counted", "topic": k.topic, "partition": 0.0, "offset": 1.0, "class": "rejected",
		"id": "m1", "error": "the handler rejected the message: no such customer",
	} {
		if letter[field] != want {
			t.Errorf("line of the dead letter: %s is %v, want %v", field, letter[field], want)
		}
	}
	for message, field := range map[string]string{
		"joining the group": "handlers", "partitions are assigned": "partitions", "handler has handled its first message": "offset",
		"leaving the group": "at_most", "left the group": "group",
	} {
		if line := first.find(t, message); line["level"] != "INFO" || line[field] == nil || line["group"] != k.group {
			t.Errorf("line %q: got %v", message, line)
		}
	}
	if line := first.find(t, "partitions are assigned"); line["partitions"] != k.topic+"[0]" {
		t.Errorf("assignment: got %v", line)
	}
	if text := first.text.String(); strings.Contains(text, "planted") || strings.Contains(text, "secret") {
		t.Errorf("a payload or a key is in the log:\n%s", text)
	}
}

func TestTheLogShowsWhyAMemberWaits(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)

	// A process that was killed leaves without a word: its group waits for it.
	network := &cutNetwork{}
	k.cfg.Dial = network.dial
	before := &logbook{}
	k.start(k.newLogged(t, before))
	k.waitUntil("the assignment", func(context.Context) bool { return before.find(t, "partitions are assigned") != nil })
	network.setDown(true)

	k.cfg.Dial = nil
	after := &logbook{}
	k.start(k.newLogged(t, after))
	k.waitUntil("the reason", func(context.Context) bool { return after.find(t, "waiting for the group") != nil })
	if line := after.find(t, "waiting for the group"); line["level"] != "INFO" || line["at_most"] == nil {
		t.Errorf("unexpected line %v", line)
	}
	k.waitUntil("the assignment", func(context.Context) bool { return after.find(t, "partitions are assigned") != nil })

	// A topic that does not exist is another reason.
	missing := &logbook{}
	k.group += "-missing"
	k.start(k.newLogged(t, missing, consumer.WithTopics(k.topic+"-missing")))
	k.waitUntil("the missing topic", func(context.Context) bool { return missing.find(t, "waiting for topics") != nil })
	if line := missing.find(t, "waiting for topics"); line["level"] != "WARN" || !strings.Contains(line["msg"].(string), "do not exist") {
		t.Errorf("unexpected line %v", line)
	}
}

// A handler that ignores its context blocks its lane. The log names it, and its message.
func TestAHandlerThatIgnoresItsTimeoutIsNamed(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	book := &logbook{}
	c := k.newConsumer(consumer.WithErrorHook(nil), consumer.WithLogger(slog.New(slog.NewJSONHandler(book, nil))),
		consumer.WithMode(consumer.AtLeastOnce), consumer.WithTimeout(50*time.Millisecond))
	release := make(chan struct{})
	addHandler(t, c, "counted", func(context.Context, *consumer.Message) error {
		<-release
		return nil
	})
	stop := k.start(c)
	k.publish(newMessage("a", "counted", "0"))

	const overdue = "handler still runs after its timeout"
	k.waitUntil("the line", func(context.Context) bool { return book.find(t, overdue) != nil })
	line := book.find(t, overdue)
	if line["level"] != "WARN" || line["handler"] != "counted" || line["id"] != "a/counted/0" || line["offset"] != 0.0 || line["topic"] != k.topic {
		t.Errorf("got %v", line)
	}
	close(release)
	k.waitUntil("the offset", func(context.Context) bool { return k.readCommitted(1)[0] == 1 })
	stop()
}
