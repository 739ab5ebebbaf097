package consumer_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// What New cannot use is one error that names the option or the argument and its value.
func TestBadArgumentsAreNamed(t *testing.T) {
	t.Parallel()
	db := newKit(t, 1).db

	for name, c := range map[string]struct {
		group string
		opts  []consumer.Option
		want  string
	}{
		"no group":         {"", []consumer.Option{consumer.WithTopics("t")}, "the name of the group is empty"},
		"no topics":        {"g", nil, "no topics: name them with WithTopics"},
		"a nameless topic": {"g", []consumer.Option{consumer.WithTopics("t", "")}, "a topic's name is empty"},
		"unknown mode":     {"g", []consumer.Option{consumer.WithTopics("t"), consumer.WithMode(9)}, "WithMode: Mode(9) is not one of"},
		"unknown start":    {"g", []consumer.Option{consumer.WithTopics("t"), consumer.WithStart(9)}, "WithStart: 9 is neither"},
		"unknown outcome": {
			"g", []consumer.Option{consumer.WithTopics("t"), consumer.WithRetry(consumer.Retry{Then: 9})}, "WithRetry: Then is 9",
		},
	} {
		_, err := consumer.New(c.group, db, append(c.opts, consumer.WithBrokers("127.0.0.1:1"))...)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %v, want one error with %q", name, err, c.want)
		}
	}
}

// A record that cannot be handled is one report that names its topic, partition and offset, and the handler if it has one. The record
// becomes one letter with its place, and the next record is handled.
func TestABadRecordIsOneReportWithItsPlace(t *testing.T) {
	t.Parallel()
	place := event.Type[struct{ N int }]{Aggregate: "order", Name: "placed"}
	failing := errors.New("no such article")
	fail := consumer.Func(func(context.Context, *consumer.Message) error { return failing }, "failing", "nameless")
	typed := consumer.For(place, func(context.Context, *consumer.Message, struct{ N int }) error { return nil })
	header := func(pairs ...string) (hs []event.Header) {
		for i := 0; i < len(pairs); i += 2 {
			hs = append(hs, event.Header{Key: pairs[i], Value: []byte(pairs[i+1])})
		}
		return hs
	}

	for name, c := range map[string]struct {
		record  consumer.Message
		opts    []consumer.Option
		handler string // "": none
		class   string
		want    string
	}{
		"without id and key": {
			record: consumer.Message{Value: []byte("{}"), Headers: header("type", "failing")}, handler: "fail", class: deadletter.ClassHandler, want: failing.Error(),
		},
		"a payload of another type": {
			record:  consumer.Message{Key: []byte("a"), Value: []byte(`{"N":"text"}`), Headers: header("id", "1", "type", "placed")},
			handler: "typed", class: deadletter.ClassMalformed, want: "is invalid",
		},
		"no JSON": {
			record:  consumer.Message{Key: []byte("a"), Value: []byte("<xml/>"), Headers: header("id", "1", "type", "placed")},
			handler: "typed", class: deadletter.ClassMalformed, want: "is invalid",
		},
		"a decoder that fails": {
			record: consumer.Message{Key: []byte("a"), Value: []byte("{}"), Headers: header("id", "1", "type", "failing")},
			opts: []consumer.Option{consumer.WithDecoder(func(_ context.Context, m *consumer.Message) error {
				if m.Offset == 0 {
					return errors.New("no schema")
				}
				return consumer.Decode(t.Context(), m)
			})},
			class: deadletter.ClassMalformed, want: "no schema",
		},
		"a decoder that panics": {
			record: consumer.Message{Key: []byte("a"), Value: []byte("{}"), Headers: header("id", "1", "type", "failing")},
			opts: []consumer.Option{consumer.WithDecoder(func(_ context.Context, m *consumer.Message) error {
				if m.Offset == 0 {
					panic("index out of range")
				}
				return consumer.Decode(t.Context(), m)
			})},
			class: deadletter.ClassPanic, want: "index out of range",
		},
		"a broken CloudEvent": {
			record: consumer.Message{Value: []byte(`{"specversion":"1.0"`), Headers: header("content-type", "application/cloudevents+json")},
			class:  deadletter.ClassMalformed, want: "structured CloudEvent",
		},
		"an id that is too long": {
			record: consumer.Message{Value: []byte("{}"), Headers: header("id", strings.Repeat("i", 3000), "type", "failing")},
			class:  deadletter.ClassMalformed, want: "at most",
		},
		"a type that no handler takes": {
			record: consumer.Message{Key: []byte("a"), Value: []byte("{}"), Headers: header("id", "1", "type", "stranger")},
			class:  deadletter.ClassUnknown, want: "stranger",
		},
		"without a type": {
			record: consumer.Message{Key: []byte("a"), Value: []byte("{}")},
			class:  deadletter.ClassUnknown, want: `type ""`,
		},
		"expired": {
			record: consumer.Message{
				Key: []byte("a"), Value: []byte("{}"), Headers: header("id", "1", "type", "failing", "x-outrelay-deliver-by", "1000"),
			},
			handler: "fail", class: deadletter.ClassExpired, want: "expired",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			var mu sync.Mutex
			var reports []string
			hook := consumer.WithErrorHook(func(_ context.Context, err error) {
				mu.Lock()
				defer mu.Unlock()
				reports = append(reports, err.Error())
			})
			cons := k.newConsumer(append(c.opts, hook, withTries(1))...)
			effects := k.insertInto("effects")
			for name, h := range map[string]consumer.Handler{"fail": fail, "typed": typed, "good": consumer.Func(effects, "good")} {
				if err := cons.Handle(name, h); err != nil {
					t.Fatal(err)
				}
			}
			k.publish(&c.record, newMessage("a", "good", "0"))
			k.start(cons)
			k.waitUntil("the offset", func(context.Context) bool { return k.readCommitted(1)[0] == 2 })
			k.checkOnce("effects", 1)

			for l, err := range k.newDesk().List(k.context(), deadletter.Query{}) {
				if err != nil || l.Class != c.class || l.ID.Topic != k.topic || l.ID.Offset != 0 || l.ID.Handler != c.handler {
					t.Errorf("letter: got %s of class %s (%v), want class %s of handler %q at offset 0", l.ID, l.Class, err, c.class, c.handler)
				}
			}
			if n := k.countDocuments(deadletter.DefaultCollection); n != 1 {
				t.Errorf("%d letters", n)
			}

			mu.Lock()
			defer mu.Unlock()
			found := 0
			for _, text := range reports {
				if strings.Contains(text, k.topic+"/0@0") && strings.Contains(text, c.want) && strings.HasPrefix(text, c.handler) {
					found++
				}
			}
			if found != 1 || len(reports) != 1 {
				t.Errorf("%d of the reports %q name the place, want 1 of 1", found, reports)
			}
		})
	}
}

// A topic that does not exist is one report that names it, and its records are read when it exists.
func TestAnUnknownTopicIsOneReport(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	missing := k.topic + "_missing"
	reports := make(chan string, 100)
	c := k.newConsumer(consumer.WithTopics(missing), consumer.WithErrorHook(func(_ context.Context, err error) { reports <- err.Error() }))

	addHandler(t, c, "counted", k.insertInto("effects"))
	k.publish(newMessages(1, 1)...)
	stop := k.start(c)
	k.waitCount("effects", 1)
	stop()
	close(reports)

	var all []string
	for text := range reports {
		all = append(all, text)
	}
	if len(all) != 1 || !strings.Contains(all[0], missing) {
		t.Errorf("reports: got %q, want one that names %s", all, missing)
	}
}
