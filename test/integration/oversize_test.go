//go:build unix

package integration

import (
	"net/http"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// One insert of a service must not stop the relay, nor fill its memory: what exceeds a limit becomes a dead letter, and the
// events of others are delivered in the same term. The position passes it.
func TestOversizeEnvelopesDisturbNobody(t *testing.T) {
	t.Parallel()
	for _, preset := range []string{"typed", "debezium"} {
		t.Run(preset, func(t *testing.T) {
			t.Parallel()
			s := kit.New(t, kit.Options{Partitions: 1})
			s.SetConfig("record.preset", preset)
			topics := s.ReadTopics()
			p := s.StartRelay()
			p.WaitTookOver()
			epoch := s.CurrentEpoch()

			undefined := make(bson.A, 1_600_000)
			for i := range undefined {
				undefined[i] = bson.Undefined{}
			}
			var nested any = undefined[:400_000]
			for range 150 {
				nested = bson.D{{Key: "a", Value: nested}}
			}
			text := func(n int) string { return strings.Repeat("x", n) }
			many := make(bson.D, 70_000)
			for i := range many {
				many[i] = bson.E{Key: "h", Value: nil}
			}
			fields := map[string]bson.D{
				"large-key":         {{Key: "aggregateid", Value: text(9 << 20)}},
				"large-key-missing": {{Key: "aggregatetype", Value: "nosuch"}, {Key: "aggregateid", Value: text(9 << 20)}},
				"large-type":        {{Key: "aggregatetype", Value: text(9 << 20)}},
				"text-payload":      {{Key: "payload", Value: text(12 << 20)}},
			}
			// Debezium's router reads no headers, and it writes an array as Java does.
			if preset == "typed" {
				fields["headers"] = bson.D{{Key: "headers", Value: many}}
				fields["headers-missing"] = bson.D{{Key: "aggregatetype", Value: "nosuch"}, {Key: "headers", Value: many}}
				fields["undefined"] = bson.D{{Key: "payload", Value: undefined}}
			} else {
				fields["undefined"] = bson.D{{Key: "payload", Value: bson.D{{Key: "a", Value: undefined}}}}
				fields["deep"] = bson.D{{Key: "payload", Value: nested}}
			}
			for id, changes := range fields {
				doc := bson.D{{Key: "_id", Value: id}}
				for _, e := range []bson.E{{Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "k"}, {Key: "type", Value: "x"}, {Key: "payload", Value: "x"}} {
					for _, c := range changes {
						if c.Key == e.Key {
							e.Value = c.Value
						}
					}
					doc = append(doc, e)
				}
				for _, c := range changes {
					if c.Key == "headers" {
						doc = append(doc, c)
					}
				}
				if _, err := s.Outbox().InsertOne(t.Context(), doc); err != nil {
					t.Fatal(id, err)
				}
				s.AppendEvents(s.Outbox(), event.New(event.Aggregate{Type: "order", ID: "k"}, "Placed", event.Bytes("", []byte("real")), event.WithID("after-"+id)))
			}

			topics.WaitDistinct(len(fields))
			letters := s.State.Collection("letters")
			stacktest.Eventually(t, "each of them is a dead letter", func() bool {
				n, err := letters.CountDocuments(t.Context(), bson.D{{Key: "class", Value: record.MessageTooLarge}, {Key: "reason", Value: bson.D{{Key: "$regex", Value: "at most"}}}})
				return err == nil && int(n) == len(fields)
			}, func() any { return p.ReadLog() })
			if now := s.CurrentEpoch(); now != epoch {
				t.Errorf("epoch %d after %d: there was a takeover", now, epoch)
			}
			mem := p.PeakMemory()
			t.Logf("peak of resident memory: %d MiB", mem>>20)
			if mem > 200<<20 {
				t.Errorf("peak of resident memory: %d MiB", mem>>20)
			}
		})
	}
}

// The token of an event with an _id of 8 MB is larger than MongoDB can send. The relay sweeps past it, the event leaves a letter, and the
// events around it arrive.
func TestAHugeIDDisturbsNobody(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Partitions: 1})
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	place := func(id string) {
		s.AppendEvents(s.Outbox(), event.New(event.Aggregate{Type: "order", ID: "k"}, "Placed", event.Bytes("", []byte("real")), event.WithID(id)))
	}

	place("before")
	huge := bson.D{
		{Key: "_id", Value: strings.Repeat("i", 8<<20)},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "k"},
		{Key: "type", Value: "Placed"},
		{Key: "payload", Value: "x"},
	}
	if _, err := s.Outbox().InsertOne(t.Context(), huge); err != nil {
		t.Fatal(err)
	}
	place("after")
	topics.WaitDistinct(2)

	stacktest.Eventually(t, "it is a dead letter", func() bool {
		n, err := s.State.Collection("letters").CountDocuments(t.Context(), bson.D{{Key: "class", Value: record.MessageTooLarge}})
		return err == nil && n == 1
	}, func() any { return p.ReadLog() })
	place("later")
	topics.WaitDistinct(3)
	stacktest.Eventually(t, "the relay is ready", func() bool { code, _ := p.Get("/readyz"); return code == http.StatusOK }, func() any { return p.ReadLog() })
}
