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

	"github.com/outrelay/outrelay/internal/demo/check"
	"github.com/outrelay/outrelay/internal/devstack"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

var retryScenario = Scenario{
	Name:    "retry",
	Promise: "a missing topic is parked while all others flow, and a refused record holds only its own key; both arrive in order once they can",
	events:  5 * 300, rate: 300, // appended to other topics, from when envelopes are parked until the missing one is made
	types:       []string{refusing},
	late:        []string{missing},
	relayConfig: map[string]any{"retry": map[string]any{"base": firstRetry.String(), "cap": firstRetry.String()}},
	run:         runRetry,
}

// RetryFinding is what scenario retry found.
type RetryFinding struct {
	Outcome
	Parked      int     `json:"parked"`        // most envelopes that were parked at a time
	MissingS    float64 `json:"missing_s"`     // how long the topic was missing
	OthersRate  float64 `json:"others_rate"`   // events a second delivered to other topics meanwhile
	OthersShare float64 `json:"others_share"`  // of those that were committed meanwhile
	OthersP99MS float64 `json:"others_p99_ms"` // from their insert to the consumer
	DrainedS    float64 `json:"drained_s"`     // from the making of the topic until nothing was parked
	Refused     int     `json:"refused"`       // records that Kafka refused for a reason of their own
	Blocked     int     `json:"blocked"`       // most envelopes that waited behind one of those at a time
	Passed      int     `json:"passed"`        // envelopes of other keys that went past them meanwhile
	ReleasedS   float64 `json:"released_s"`    // from when the topic took them until all had arrived
}

func (f *RetryFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("missing topic     %.1f s; %s envelopes parked, drained %.1f s after it was made", f.MissingS, formatThousands(f.Parked), f.DrainedS),
		fmt.Sprintf("others meanwhile  %.0f events/s delivered, %.1f %% of what was committed; p99 %.1f ms", f.OthersRate, 100*f.OthersShare, f.OthersP99MS),
		fmt.Sprintf("refused records   %d; %d envelopes of their keys waited, %d of other keys went past; all there %.1f s after the topic took them", f.Refused, f.Blocked, f.Passed, f.ReleasedS),
	}
}

const (
	missing    = "invoice"        // its topic comes late
	refusing   = "payment"        // its topic refuses records for a while
	firstRetry = 15 * time.Second // what is appended behind the refused ones has to be there sooner

	leastShare  = 0.95 // of the other topics' events that must flow while one is missing
	heldKeys    = 12   // keys whose first event is refused
	laterEvents = 10   // events of each that wait behind it

	// The brokers' bound on the age of a record, by its timestamp: with 0 they take none that was committed a
	// millisecond ago, and say so of each record by itself.
	ageSetting = "message.timestamp.before.max.ms"
)

func runRetry(ctx context.Context, s *stage) (Finding, error) {
	f := &RetryFinding{}
	if _, err := s.startAndAwait(ctx, "owner"); err != nil {
		return f, err
	}
	others, err := s.startLoad(ctx, aggregate, "customer", s.options.Rate, 0, appendEvenly)
	if err != nil {
		return f, err
	}
	if err := s.runFor(ctx, warmUp); err != nil {
		return f, err
	}
	if err := s.missTopic(ctx, others, f); err != nil {
		return f, err
	}
	if err := s.refuseRecords(ctx, f); err != nil {
		return f, err
	}
	if err := others.finishLoad(true); err != nil {
		return f, err
	}
	return f, s.awaitArrival(ctx)
}

// missTopic appends events whose topic is not there, and makes it after a while.
func (s *stage) missTopic(ctx context.Context, others *load, f *RetryFinding) error {
	w := s.startWitness(s.names.topicName(aggregate))
	began, before := time.Now(), others.done.Load()
	l, err := s.startLoad(ctx, missing, "account", max(s.options.Rate/3, 1), 0)
	if err != nil {
		return err
	}
	s.printEvent("%d events/s for the topic %s, which is not there", max(s.options.Rate/3, 1), s.names.topicName(missing))
	parked := func() bool {
		f.Parked = max(f.Parked, s.countEnvelopes(ctx, stateIs(event.StateParked)))
		return f.Parked > 0
	}
	if err := s.awaitCondition(ctx, "envelopes are parked", patience, parked); err != nil {
		return err
	}
	if err := s.runFor(ctx, s.durationOf(s.options.Events)); err != nil {
		return err
	}
	// What was committed just now is on its way, which on a busy machine takes a while: it has to come while the topic is
	// missing.
	committed := others.done.Load() - before
	took, arrived := time.Since(began), w.countOf("customer")
	share := func() float64 { return min(float64(w.countOf("customer"))/float64(max(committed, 1)), 1) }
	err = s.awaitCondition(ctx, "the other topics' events flow while one is missing", patience, func() bool { return share() > leastShare })
	f.OthersShare = share()
	if err != nil {
		return err
	}
	_, p99 := w.stopCounting()
	f.MissingS, f.OthersRate, f.OthersP99MS = roundSeconds(took), float64(int(float64(arrived)/took.Seconds())), p99
	parked()
	s.printEvent("%s envelopes are parked; the topic is made now", formatThousands(f.Parked))
	made := time.Now()
	if err := s.createTopic(ctx, missing); err != nil {
		return err
	}
	if err := s.awaitCondition(ctx, "nothing is parked any more", patience, func() bool { return s.countEnvelopes(ctx, stateIs(event.StateParked)) == 0 }); err != nil {
		return err
	}
	f.DrainedS = roundSeconds(time.Since(made))
	s.printEvent("nothing is parked any more, %.1f s later", f.DrainedS)
	return l.finishLoad(true)
}

// refuseRecords lets Kafka refuse the first event of some keys, appends more behind each, and then lets the topic take them.
func (s *stage) refuseRecords(ctx context.Context, f *RetryFinding) error {
	if err := s.setAge(ctx, "0"); err != nil {
		return err
	}
	held, err := s.refuseFirst(ctx)
	if f.Refused = len(held); err != nil {
		return err
	}
	if err := s.appendTo(ctx, held, laterEvents); err != nil {
		return err
	}
	blocked := func() bool {
		f.Blocked = max(f.Blocked, s.countEnvelopes(ctx, stateIs(event.StateBlocked)))
		return f.Blocked > 0
	}
	if err := s.awaitCondition(ctx, "later events of these keys wait", patience, blocked); err != nil {
		return err
	}
	if err := s.setAge(ctx, "86400000"); err != nil {
		return err
	}
	took := time.Now()
	w := s.startWitness(s.names.topicName(refusing))
	if err := s.appendTo(ctx, nameKeys("free", 0, heldKeys), laterEvents); err != nil {
		return err
	}
	s.printEvent("Kafka refused the first events of %d keys; it takes them now. Later ones of these keys wait, those of others do not", f.Refused)
	waiting := func() bool { return s.countEnvelopes(ctx, stateIs(event.StateRetry)) > 0 }
	if err := s.awaitCondition(ctx, "events of other keys go past", patience, func() bool { blocked(); return w.countOf("free") == heldKeys*laterEvents || !waiting() }); err != nil {
		return err
	}
	f.Passed = w.countOf("free")
	if !waiting() {
		s.recordBroken("nothing waited any more when the events of other keys had gone past")
	}
	if err := s.awaitCondition(ctx, "no envelope waits any more", patience, func() bool { blocked(); return s.countEnvelopes(ctx, anyState()) == 0 }); err != nil {
		return err
	}
	f.ReleasedS = roundSeconds(time.Since(took))
	w.stopCounting()
	return nil
}

// refuseFirst appends one event of each of heldKeys keys and returns those whose event Kafka refused. It takes one that reaches it
// within the millisecond of its commit, as a quick machine can: then there is another key instead.
func (s *stage) refuseFirst(ctx context.Context) (held []string, _ error) {
	w := s.startWitness(s.names.topicName(refusing))
	defer w.stopCounting()
	late := time.Now().Add(patience)
	for first := 0; len(held) < heldKeys; {
		if time.Now().After(late) {
			return held, &brokenPromise{fmt.Sprintf("not within %v: Kafka refuses the first events of %d keys, %d of %d it refused", patience, heldKeys, len(held), first)}
		}
		keys := nameKeys("held", first, heldKeys-len(held))
		first += len(keys)
		if err := s.appendTo(ctx, keys, 1); err != nil {
			return held, err
		}
		refused := map[string]bool{}
		answered := func() bool {
			var now []string
			if err := s.outboxCollection().Distinct(ctx, "key", stateIs(event.StateRetry)).Decode(&now); err == nil {
				for _, k := range now {
					refused[k] = true
				}
			}
			return !slices.ContainsFunc(keys, func(k string) bool { return !refused[k] && w.countOf(k) == 0 })
		}
		if err := s.awaitCondition(ctx, fmt.Sprintf("Kafka refuses or takes the first events of %d keys", len(keys)), patience, answered); err != nil {
			return held, err
		}
		for _, k := range keys {
			if refused[k] {
				held = append(held, k)
			}
		}
	}
	return held, nil
}

// nameKeys names n keys, from a number on.
func nameKeys(who string, first, n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("%s-%d", who, first+i)
	}
	return keys
}

// setAge changes what the refusing topic takes. A broker that shares a busy machine is away from its controller at times:
// it is asked again.
func (s *stage) setAge(ctx context.Context, ms string) error {
	var last error
	err := s.awaitCondition(ctx, "the setting of the topic", settleWithin, func() bool {
		last = s.stack.SetTopic(ctx, s.names.topicName(refusing), ageSetting, ms)
		return last == nil
	})
	if last != nil && ctx.Err() == nil {
		return last
	}
	return err
}

func stateIs(state string) bson.D { return bson.D{{Key: "state", Value: state}} }

func anyState() bson.D { return bson.D{{Key: "state", Value: bson.D{{Key: "$exists", Value: true}}}} }

// appendTo appends n events of the refusing topic for each of some keys, in one transaction for each key, side by side.
func (s *stage) appendTo(ctx context.Context, keys []string, n int) error {
	var g errgroup.Group
	for _, key := range keys {
		g.Go(func() error { return s.appendKey(ctx, key, n) })
	}
	return g.Wait()
}

func (s *stage) appendKey(ctx context.Context, key string, n int) error {
	ids, events := []string(nil), []event.Event(nil)
	for range n {
		id := uuid.Must(uuid.NewV7())
		payload := fmt.Appendf(nil, `{"of":%q}`, key)
		s.check.Begin(check.Event{ID: id.String(), Key: key, Topics: []string{s.names.topicName(refusing)}, Value: payload})
		ids, events = append(ids, id.String()), append(events, event.New(refusing, key, "PaymentMade", payload, event.WithID(id)))
	}
	err := outbox.Transaction(ctx, s.client, func(ctx context.Context) error { return s.service.box.AppendMany(ctx, events) })
	if err != nil {
		return fmt.Errorf("appending events of one key: %w", err)
	}
	s.check.Committed(time.Now(), ids...)
	return nil
}

// witness counts the records of one topic for a while.
type witness struct {
	s     *stage
	topic string

	mu    sync.Mutex
	over  bool
	delay []time.Duration
	who   map[string]int // by key, and by what stands before its "-"
}

// startWitness starts a witness, in the place of the one before.
func (s *stage) startWitness(topic string) *witness {
	w := &witness{s: s, topic: topic, who: map[string]int{}}
	hear := w.countRecord
	s.onRecord.Store(&hear)
	return w
}

func (w *witness) countRecord(m devstack.Message) {
	if m.Topic != w.topic {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over {
		return
	}
	w.delay = append(w.delay, m.Seen.Sub(m.Time))
	w.who[string(m.Key)]++
	if who, _, more := strings.Cut(string(m.Key), "-"); more {
		w.who[who]++
	}
}

// countOf is how many records of a key were seen, or of all keys that begin with who and "-".
func (w *witness) countOf(who string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.who[who]
}

// stopCounting returns how many records were seen and the 99th percentile of their delay from their timestamp, in milliseconds.
func (w *witness) stopCounting() (n int, p99 float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	slices.Sort(w.delay)
	return len(w.delay), quantile(w.delay, 0.99)
}
