package demo

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/lab/demo/check"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
)

var retryScenario = Scenario{
	Name:    "retry",
	Promise: "a missing topic is parked while all others flow, and a rejected record holds only its own key; both arrive in order once they can",
	// Events of the other topics, from when envelopes are parked until the missing topic is
	// created.
	events:      5 * 300,
	rate:        300,
	types:       []string{rejecting},
	late:        []string{missing},
	relayConfig: map[string]any{"retry": map[string]any{"base": firstRetry.String(), "cap": firstRetry.String()}},
	run:         runRetry,
}

// RetryFinding is the result of scenario retry.
type RetryFinding struct {
	Outcome
	Parked      int     `json:"parked"`        // maximum number of parked envelopes
	MissingS    float64 `json:"missing_s"`     // how long the topic was missing
	OthersRate  float64 `json:"others_rate"`   // delivery rate of the other topics in that time, in events per second
	OthersShare float64 `json:"others_share"`  // share of the events committed in that time that were delivered
	OthersP99MS float64 `json:"others_p99_ms"` // from their insert to the consumer
	DrainedS    float64 `json:"drained_s"`     // from the creation of the topic until no envelope was parked
	Rejected    int     `json:"rejected"`      // records that Kafka rejected for their own reason
	Blocked     int     `json:"blocked"`       // maximum number of envelopes that waited for a rejected one
	Passed      int     `json:"passed"`        // envelopes of other keys that were delivered in that time
	ReleasedS   float64 `json:"released_s"`    // from when the topic accepted the records until all had arrived
}

func (f *RetryFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("missing topic     %.1f s; %s envelopes parked, drained %.1f s after it was created",
			f.MissingS, formatThousands(f.Parked), f.DrainedS),
		fmt.Sprintf("other topics      %.0f events/s delivered in that time, %.1f %% of the committed ones; p99 %.1f ms",
			f.OthersRate, 100*f.OthersShare, f.OthersP99MS),
		fmt.Sprintf("rejected records   %d; %d envelopes of their keys waited, %d of other keys did not; "+
			"all arrived %.1f s after the topic accepted them", f.Rejected, f.Blocked, f.Passed, f.ReleasedS),
	}
}

const (
	missing    = "invoice"        // its topic is created late
	rejecting  = "payment"        // its topic rejects records for a while
	firstRetry = 15 * time.Second // events after the rejected ones must be appended within this time

	leastShare  = 0.95 // of the other topics' events that must be delivered while one topic is missing
	heldKeys    = 12   // keys whose first event is rejected
	laterEvents = 10   // events of each key that wait for it

	// The broker's limit on the age of a record, by its timestamp. With 0 it rejects each record
	// that was committed a millisecond ago, one by one.
	ageSetting = "message.timestamp.before.max.ms"
)

// warmUp is how long a load runs before the fault.
const warmUp = 3 * time.Second

func runRetry(ctx context.Context, stage *stage) (Finding, error) {
	finding := &RetryFinding{}
	if _, err := stage.startAndAwait(ctx, "owner"); err != nil {
		return finding, err
	}
	others, err := stage.startLoad(ctx, aggregate, "customer", stage.options.Rate, 0, appendEvenly)
	if err != nil {
		return finding, err
	}
	if err := stage.runFor(ctx, warmUp); err != nil {
		return finding, err
	}

	if err := stage.missTopic(ctx, others, finding); err != nil {
		return finding, err
	}
	if err := stage.rejectRecords(ctx, finding); err != nil {
		return finding, err
	}
	if err := others.finishLoad(true); err != nil {
		return finding, err
	}
	return finding, stage.awaitArrival(ctx)
}

// missTopic appends events whose topic does not exist, and creates the topic after a while.
func (s *stage) missTopic(ctx context.Context, others *load, finding *RetryFinding) error {
	witness := s.startWitness(s.names.topicName(aggregate))
	began := time.Now()
	before := others.done.Load()
	rate := max(s.options.Rate/3, 1)
	load, err := s.startLoad(ctx, missing, "account", rate, 0)
	if err != nil {
		return err
	}
	s.printEvent("%d events/s for the topic %s, which does not exist", rate, s.names.topicName(missing))

	updateParked := func() bool {
		finding.Parked = max(finding.Parked, s.countWaiting(ctx, waiting.Parked))
		return finding.Parked > 0
	}
	if err := s.awaitCondition(ctx, "envelopes are parked", patience, updateParked); err != nil {
		return err
	}
	if err := s.runFor(ctx, s.durationOf(s.options.Events)); err != nil {
		return err
	}

	// On a busy machine, the delivery of the latest events takes a while. They must arrive while
	// the topic is missing.
	committed := others.done.Load() - before
	took := time.Since(began)
	arrived := witness.countOf("customer")
	share := func() float64 { return min(float64(witness.countOf("customer"))/float64(max(committed, 1)), 1) }
	what := "the other topics' events are delivered while one topic is missing"
	err = s.awaitCondition(ctx, what, patience, func() bool { return share() > leastShare })
	finding.OthersShare = share()
	if err != nil {
		return err
	}

	_, finding.OthersP99MS = witness.stopCounting()
	finding.MissingS = roundSeconds(took)
	finding.OthersRate = float64(int(float64(arrived) / took.Seconds()))
	updateParked()
	s.printEvent("%s envelopes are parked; the topic is created now", formatThousands(finding.Parked))

	created := time.Now()
	if err := s.createTopic(ctx, missing); err != nil {
		return err
	}
	err = s.awaitCondition(ctx, "no envelope is parked", patience, func() bool {
		return s.countWaiting(ctx, waiting.Parked) == 0
	})
	if err != nil {
		return err
	}
	finding.DrainedS = roundSeconds(time.Since(created))
	s.printEvent("no envelope is parked, %.1f s later", finding.DrainedS)
	return load.finishLoad(true)
}

// rejectRecords makes Kafka reject the first event of some keys, appends more events of each key,
// and then makes the topic accept the records.
func (s *stage) rejectRecords(ctx context.Context, finding *RetryFinding) error {
	// With an age limit of 0, Kafka rejects each record that arrives later than its timestamp.
	if err := s.setAge(ctx, "0"); err != nil {
		return err
	}
	held, err := s.rejectFirst(ctx)
	finding.Rejected = len(held)
	if err != nil {
		return err
	}
	if err := s.appendTo(ctx, held, laterEvents); err != nil {
		return err
	}
	// Envelopes are blocked for a short time only, so the maximum is noted.
	updateBlocked := func() bool {
		finding.Blocked = max(finding.Blocked, s.countWaiting(ctx, waiting.Blocked))
		return finding.Blocked > 0
	}
	if err := s.awaitCondition(ctx, "later events of these keys wait", patience, updateBlocked); err != nil {
		return err
	}

	if err := s.setAge(ctx, "86400000"); err != nil {
		return err
	}
	accepted := time.Now()
	witness := s.startWitness(s.names.topicName(rejecting))
	if err := s.appendTo(ctx, nameKeys("free", 0, heldKeys), laterEvents); err != nil {
		return err
	}
	s.printEvent("Kafka rejected the first events of %d keys, and accepts them now. "+
		"Later events of these keys wait, events of other keys do not", finding.Rejected)

	// The order matters: events of other keys must arrive while the rejected events still wait.
	waits := func() bool { return s.countWaiting(ctx, waiting.Retry) > 0 }
	err = s.awaitCondition(ctx, "events of other keys are delivered", patience, func() bool {
		updateBlocked()
		return witness.countOf("free") == heldKeys*laterEvents || !waits()
	})
	if err != nil {
		return err
	}
	finding.Passed = witness.countOf("free")
	if !waits() {
		s.recordBroken("no envelope waited when the events of other keys were delivered")
	}

	err = s.awaitCondition(ctx, "no envelope waits", patience, func() bool {
		updateBlocked()
		return s.countWaiting(ctx) == 0
	})
	if err != nil {
		return err
	}
	finding.ReleasedS = roundSeconds(time.Since(accepted))
	witness.stopCounting()
	return nil
}

// rejectFirst appends one event for each of heldKeys keys, and returns the keys whose event Kafka
// rejected. Kafka accepts a record that arrives within a millisecond of its commit, which happens
// on a fast machine. Then rejectFirst uses another key instead.
func (s *stage) rejectFirst(ctx context.Context) (held []string, _ error) {
	witness := s.startWitness(s.names.topicName(rejecting))
	defer witness.stopCounting()

	deadline := time.Now().Add(patience)
	first := 0
	for len(held) < heldKeys {
		if time.Now().After(deadline) {
			return held, &brokenPromise{fmt.Sprintf("not within %v: Kafka rejects the first events of %d keys; "+
				"it rejected %d of %d", patience, heldKeys, len(held), first)}
		}

		keys := nameKeys("held", first, heldKeys-len(held))
		first += len(keys)
		if err := s.appendTo(ctx, keys, 1); err != nil {
			return held, err
		}

		rejected := map[string]bool{}
		undecided := func(key string) bool { return !rejected[key] && witness.countOf(key) == 0 }
		what := fmt.Sprintf("Kafka rejects or accepts the first events of %d keys", len(keys))
		err := s.awaitCondition(ctx, what, patience, func() bool {
			isRetried := ofWatcher(bson.E{Key: "reason", Value: waiting.Retry})
			retried, err := cursor.Distinct[string]("reading the keys that are retried", s.stateDatabase().Collection("waiting").Distinct(ctx, "key", isRetried))
			if err == nil {
				for _, key := range retried {
					rejected[key] = true
				}
			}
			return !slices.ContainsFunc(keys, undecided)
		})
		if err != nil {
			return held, err
		}
		for _, key := range keys {
			if rejected[key] {
				held = append(held, key)
			}
		}
	}
	return held, nil
}

// nameKeys returns n keys with the given prefix, numbered from first.
func nameKeys(prefix string, first, n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("%s-%d", prefix, first+i)
	}
	return keys
}

// setAge changes the age limit of the rejecting topic. On a busy machine the broker sometimes loses
// its controller, so setAge repeats a failed request for a while.
func (s *stage) setAge(ctx context.Context, ms string) error {
	var lastErr error
	err := s.awaitCondition(ctx, "the setting of the topic", settleWithin, func() bool {
		lastErr = devstack.SetTopic(ctx, s.stack.Brokers(), s.names.topicName(rejecting), ageSetting, ms)
		return lastErr == nil
	})
	if lastErr != nil && ctx.Err() == nil {
		return lastErr
	}
	return err
}

// appendTo appends n events of the rejecting topic for each key. The transactions, one per key, run
// concurrently.
func (s *stage) appendTo(ctx context.Context, keys []string, n int) error {
	var group errgroup.Group
	for _, key := range keys {
		group.Go(func() error { return s.appendKey(ctx, key, n) })
	}
	return group.Wait()
}

// appendKey appends n events of one key in one transaction.
func (s *stage) appendKey(ctx context.Context, key string, n int) error {
	var ids []string
	var events []event.Event
	for range n {
		id := uuid.Must(uuid.NewV7())
		payload := fmt.Appendf(nil, `{"of":%q}`, key)
		// The checker gets the event before its commit, because the relay may be faster than the acknowledgement.
		s.check.Begin(check.Event{
			ID:     id.String(),
			Key:    key,
			Topics: []string{s.names.topicName(rejecting)},
			Value:  payload,
		})
		ids = append(ids, id.String())
		events = append(events, event.New(event.Aggregate{Type: rejecting, ID: key}, "PaymentMade", event.Bytes("", payload), event.WithID(id)))
	}

	err := s.service.box.Transaction(ctx, func(ctx context.Context) error {
		return s.service.box.Append(ctx, events...)
	})
	if err != nil {
		return fmt.Errorf("appending events of one key: %w", err)
	}
	s.check.Committed(time.Now(), ids...)
	return nil
}

// witness counts the records of one topic.
type witness struct {
	s     *stage
	topic string

	mu    sync.Mutex
	over  bool
	delay []time.Duration
	who   map[string]int // by key, and by the part of the key before "-"
}

// startWitness starts a witness, which replaces the previous one.
func (s *stage) startWitness(topic string) *witness {
	witness := &witness{s: s, topic: topic, who: map[string]int{}}
	onRecord := witness.countRecord
	s.onRecord.Store(&onRecord)
	return witness
}

func (w *witness) countRecord(message devstack.Message) {
	if message.Topic != w.topic {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over {
		return
	}

	key := string(message.Key)
	w.delay = append(w.delay, message.Seen.Sub(message.Time))
	w.who[key]++
	if prefix, _, found := strings.Cut(key, "-"); found {
		w.who[prefix]++
	}
}

// countOf returns the number of records with this key, or with a key that begins with who and "-".
func (w *witness) countOf(who string) int {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.who[who]
}

// stopCounting returns the number of records, and the 99th percentile of their delay since their
// timestamp in milliseconds.
func (w *witness) stopCounting() (n int, p99 float64) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.over = true
	slices.Sort(w.delay)
	return len(w.delay), quantile(w.delay, 0.99)
}
