//go:build unix

package kit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// CreateTopic creates the topic of an aggregate type while the scene runs.
func (s *Scene) CreateTopic(aggregateType string, partitions, replicas int, configs ...kafka.ConfigEntry) {
	s.tb.Helper()
	stacktest.CreateTopicOn(s.tb, s.Brokers, s.TopicOf(aggregateType), partitions, replicas, configs...)
}

// GrowTopic adds partitions to the topic of an aggregate type.
func (s *Scene) GrowTopic(aggregateType string, add int) {
	s.tb.Helper()
	s.administer("adding partitions to", aggregateType, func(ctx context.Context, admin *kadm.Client, topic string) error {
		res, err := admin.CreatePartitions(ctx, add, topic)
		return errors.Join(err, res.Error())
	})
}

// DeleteTopic deletes the topic of an aggregate type. When it returns, each broker reports that there is no such topic.
func (s *Scene) DeleteTopic(aggregateType string) {
	s.tb.Helper()
	s.administer("deleting", aggregateType, func(ctx context.Context, admin *kadm.Client, topic string) error {
		_, err := admin.DeleteTopic(ctx, topic)
		return err
	})

	for _, broker := range s.Brokers {
		stacktest.EventuallyIn(s.tb, Patience, broker+" reports that the topic is gone", func() bool {
			cl, err := kgo.NewClient(kgo.SeedBrokers(broker))
			if err != nil {
				s.tb.Fatal(err)
			}
			defer cl.Close()
			known, err := kadm.NewClient(cl).ListTopics(s.tb.Context(), s.TopicOf(aggregateType))
			return err == nil && !known.Has(s.TopicOf(aggregateType))
		})
	}
}

// SetTopicConfig changes one setting of the topic of an aggregate type. It blocks until a broker reports the change.
func (s *Scene) SetTopicConfig(aggregateType, setting, value string) {
	s.tb.Helper()
	if err := devstack.SetTopic(s.tb.Context(), s.Brokers, s.TopicOf(aggregateType), setting, value); err != nil {
		s.tb.Fatal(err)
	}
}

// administer changes the topic of an aggregate type. doing describes the change in the failure message.
func (s *Scene) administer(doing, aggregateType string, change func(context.Context, *kadm.Client, string) error) {
	s.tb.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(s.Brokers...))
	if err != nil {
		s.tb.Fatal(err)
	}
	defer cl.Close()

	ctx, cancel := context.WithTimeout(s.tb.Context(), Patience)
	defer cancel()
	if err := change(ctx, kadm.NewClient(cl), s.TopicOf(aggregateType)); err != nil {
		s.tb.Fatalf("%s topic %s: %v", doing, s.TopicOf(aggregateType), err)
	}
}

// CountOutbox returns the number of outbox documents that match.
func (s *Scene) CountOutbox(filter bson.D) int {
	s.tb.Helper()
	ctx, cancel := context.WithTimeout(s.tb.Context(), Patience)
	defer cancel()
	n, err := s.Outbox().CountDocuments(ctx, filter)
	if err != nil {
		s.tb.Fatal(err)
	}
	return int(n)
}

// CountHeld returns the number of envelopes that wait for one of these reasons, or without arguments for any reason.
func (s *Scene) CountHeld(reasons ...string) int {
	s.tb.Helper()
	if len(reasons) == 0 {
		return s.CountState("waiting", bson.D{})
	}
	return s.CountState("waiting", bson.D{{Key: "reason", Value: bson.D{{Key: "$in", Value: reasons}}}})
}

// CountState returns the number of documents of a state collection that match.
func (s *Scene) CountState(collection string, filter bson.D) int {
	s.tb.Helper()
	ctx, cancel := context.WithTimeout(s.tb.Context(), Patience)
	defer cancel()
	n, err := s.State.Collection(collection).CountDocuments(ctx, filter)
	if err != nil {
		s.tb.Fatal(err)
	}
	return int(n)
}

// readState returns the documents of a state collection that match, or the error, for a message.
func (s *Scene) readState(collection string, filter bson.D) any {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.tb.Context()), Patience)
	defer cancel()
	cur, err := s.State.Collection(collection).Find(ctx, filter)
	all, err := cursor.All[bson.D](ctx, "reading "+collection, cur, err)
	if err != nil {
		return err
	}
	return all
}

// WaitHeld waits until more than n envelopes are parked or wait after a parked envelope of their key. The number of parked envelopes
// alone is bounded by the number of keys.
func (s *Scene) WaitHeld(n int) {
	s.tb.Helper()
	stacktest.Eventually(s.tb, fmt.Sprintf("more than %d envelopes wait", n), func() bool { return s.CountHeld("parked", "blocked") > n })
}

// WaitNoneHeld waits until no envelope waits, is claimed or has a due time.
func (s *Scene) WaitNoneHeld() {
	s.tb.Helper()
	left := 0
	defer func() {
		if left > 0 {
			s.tb.Logf("%d envelopes still wait", left)
		}
	}()

	stacktest.Eventually(s.tb, "no envelope waits", func() bool {
		left = s.CountHeld() + s.CountState(waiting.ClaimsName, bson.D{}) + s.CountOutbox(bson.D{{Key: "dueAt", Value: bson.D{{Key: "$exists", Value: true}}}})
		return left == 0
	})
}

// Schedule commits n events in transactions of 100 and adds them to the ledger. Their due times are
// spread evenly over span, from start on, and their keys repeat. It returns the events sorted by due
// time.
func (s *Scene) Schedule(aggregateType string, n, keys int, start time.Time, span time.Duration) []event.Event {
	s.tb.Helper()
	box, err := outbox.New(s.DB)
	if err != nil {
		s.tb.Fatal(err)
	}

	all := make([]event.Event, n)
	for i := range all {
		ev := NewEvent(aggregateType, fmt.Sprintf("w%d-k%d", i%4, i%keys), i, 60)
		at := start.Add(span * time.Duration(i) / time.Duration(n))
		ev = ev.With(event.WithDueAt(at))
		all[i] = ev
	}

	for i := 0; i < n; i += 100 {
		part := all[i:min(i+100, n)]
		err := box.Transaction(s.tb.Context(), func(ctx context.Context) error { return box.Append(ctx, part...) })
		if err != nil {
			s.tb.Fatal(err)
		}
		entries := s.ledgerEntries(s.DB.Name()+".outbox", Committed, part)
		// Scheduled events are not ordered within their key.
		for i := range entries {
			entries[i].Unordered = true
		}
		s.Ledger.Add(entries...)
	}
	return all
}

// Deliveries counts the records of each event by the header outrelay-delivery. "" stands for no header.
func (t *Topics) Deliveries() map[string]map[string]int {
	out := map[string]map[string]int{}
	for _, r := range t.AllRecords() {
		id := r.Header(record.HeaderID)
		if out[id] == nil {
			out[id] = map[string]int{}
		}
		out[id][r.Header(record.HeaderDelivery)]++
	}
	return out
}

// ResidentMemory returns the resident memory in bytes from the metrics of the process, or 0 if they do
// not include it.
func (p *Process) ResidentMemory() int64 {
	p.tb.Helper()
	_, body := p.Get("/metrics")
	for line := range strings.Lines(body) {
		if value, ok := strings.CutPrefix(line, "process_resident_memory_bytes "); ok {
			n, _ := strconv.ParseFloat(strings.TrimSpace(value), 64)
			return int64(n)
		}
	}
	return 0
}

// PeakMemory returns the most memory that was resident so far, in bytes. Where the system does not record it, it is the present
// one.
func (p *Process) PeakMemory() int64 {
	p.tb.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return p.ResidentMemory()
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
			return kb << 10
		}
	}
	return p.ResidentMemory()
}

// KilledByCrashPoint waits up to duration until a crash point kills the process. It reports whether that
// happened. Otherwise it kills the process.
func (p *Process) KilledByCrashPoint(duration time.Duration) bool {
	timeout := time.NewTimer(duration)
	defer timeout.Stop()
	select {
	case <-p.done:
		return true
	case <-timeout.C:
		p.Kill()
		return false
	}
}
