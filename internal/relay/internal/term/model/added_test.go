package model

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// lateNS is an outbox that the configuration of some worlds names late (N27). Its deliveries are recorded by a deletion.
const lateNS = "late.outbox"

// isRecorded reports whether deliveries are recorded. With the undo switch, another rule must not find what it breaks.
func (w *world) isRecorded() bool { return w.adds && w.undo != waitedForAll }

// nameLate restarts the owner with a configuration that names the late outbox.
func (w *world) nameLate() {
	w.named = true
	w.logf("the configuration names %s", lateNS)
	if w.owner != nil {
		w.owner.die("is restarted")
	}
}

// planSweep plans the sweep of the late outbox, if the watcher document still describes the earlier stream.
func (t *term) planSweep() {
	if !t.named || t.w.doc.described {
		return
	}
	t.sweeps = true
	position := outboxes.PosOf(t.w.doc.position)
	for _, s := range t.w.stream {
		if s.ns == lateNS && s.pos <= position {
			t.toSweep = append(t.toSweep, s)
		}
	}

	if t.w.undo != sendOwed && t.w.undo != waitedForAll {
		t.resolver.HoldSwept()
	}
}

// sweep delivers the next envelope of the late outbox. It precedes the stream.
func (t *term) sweep() {
	n := min(1, len(t.toSweep))
	for _, s := range t.toSweep[:n] {
		if t.w.outboxes[lateNS][s.id] != s {
			continue
		}
		t.w.logf("%s sweeps %s", t, s)
		envelope := outboxes.NewEnvelope(s.ns, s.raw)
		envelope.TS = s.clusterTime
		if err := t.swept.DeliverSwept(context.Background(), &envelope, outboxes.PosAt(s.clusterTime)); err != nil {
			t.die("ends: " + err.Error())
			return
		}
	}

	t.toSweep = t.toSweep[n:]
	if len(t.toSweep) == 0 {
		t.sweeps = false
		t.resolver.ReleaseSwept()
	}
}

// isRead reports whether the stream of the term contains an event.
func (t *term) isRead(s *spec) bool { return t.named || s.ns != lateNS }

// recordEnd deletes the envelope of an outcome from the late outbox.
func (w *world) recordEnd(outcome *ledger.Outcome) {
	ns, id := outcome.NS, outcome.EnvelopeID
	switch {
	case outcome.Doc != nil:
		ns, id = outcome.Doc.NS, outcome.Doc.ID
	case outcome.Raw != nil:
		id = outcome.Raw.Lookup("_id")
	}

	isFinal := outcome.End == ledger.Sent || outcome.End == ledger.Dead || outcome.End == ledger.Dropped
	if ns == lateNS && isFinal && outcome.Recorded && !outcome.Partial {
		w.logf("%s is deleted from its outbox", w.outboxes[ns][id.StringValue()])
		delete(w.outboxes[ns], id.StringValue())
	}
}

// knownTopics models the topics for which envelopes are stored when a sweep begins.
type knownTopics struct {
	w      *world
	before map[int][]string // by event; nil: not read yet
}

// TopicsOf implements pipeline.StoredTopics.
func (k *knownTopics) TopicsOf(_ context.Context, _ string, raw bson.Raw) (topics []string, found bool, err error) {
	stored := k.w.storedTopics()
	if k.before == nil {
		k.before = stored
	}

	number := k.w.specOf(raw).number
	before, found := k.before[number]
	if found && k.w.undo == waitedForAll && len(stored[number]) == 0 {
		return []string{""}, true, nil
	}
	if !found {
		return nil, false, nil
	}
	return slices.Concat(before, stored[number]), true, nil
}

// storedTopics returns the topics for which each event waits or is dead.
func (w *world) storedTopics() map[int][]string {
	topics := map[int][]string{}
	for _, d := range w.store {
		number := w.specOf(d.Envelope).number
		topics[number] = append(topics[number], d.Pending...)
	}
	for _, dead := range w.letters {
		topics[dead.number] = append(topics[dead.number], dead.mark.Topic)
	}
	return topics
}
