package demo

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
)

var poisonScenario = Scenario{
	Name:    "poison",
	Promise: "envelopes that can never be sent become dead letters with their class; all good ones among them arrive in order",
	events:  3000,
	rate:    300,
	run:     runPoison,
}

// PoisonFinding is the result of scenario poison.
type PoisonFinding struct {
	Outcome
	Poisoned int            `json:"poisoned"` // inserted envelopes that cannot be sent
	Classes  map[string]int `json:"classes"`  // their dead letters, by class
	MovedS   float64        `json:"moved_s"`  // longest time from an insert to the dead letter
}

func (f *PoisonFinding) describeFigures() []string {
	var classes []string
	for _, c := range slices.Sorted(maps.Keys(f.Classes)) {
		classes = append(classes, fmt.Sprintf("%s %d", c, f.Classes[c]))
	}
	return []string{
		fmt.Sprintf("poisoned          %s, dead letters by class: %s",
			formatThousands(f.Poisoned), strings.Join(classes, " · ")),
		fmt.Sprintf("moved             within %.2f s of the insert", f.MovedS),
	}
}

// poison is a defect of an envelope: its difference from a good envelope, and the expected class of
// its dead letter.
type poison struct {
	class record.Class
	set   bson.D // replaced fields; a nil value removes the field
}

const tooLarge = 2 << 20 // bytes; the brokers accept 1 MiB

func poisonKinds() []poison {
	set := func(name string, value any) bson.D { return bson.D{{Key: name, Value: value}} }
	header := bson.A{bson.D{{Key: "k", Value: "id"}, {Key: "v", Value: []byte("mine")}}}
	return []poison{
		{record.Malformed, set("aggregatetype", nil)},
		{record.Malformed, set("aggregateid", "")},
		{record.Malformed, set("payload", int32(7))},
		{record.Malformed, set("headers", header)},
		{record.Malformed, set("type", bson.A{})},
		{record.MessageTooLarge, set("payload", make([]byte, tooLarge))},
		{record.NotAllowed, set("topic", "__consumer_offsets")},
		{record.PartitionOutOfRange, set("partition", int32(1000))},
		{record.Expired, set("expiresAt", time.Now().Add(-time.Hour))},
	}
}

// buildEnvelope returns an envelope with the defect. key is a key of good envelopes.
func (p poison) buildEnvelope(id uuid.UUID, key string) bson.D {
	doc := bson.D{
		{Key: "_id", Value: bson.Binary{Subtype: bson.TypeBinaryUUID, Data: id[:]}},
		{Key: "aggregatetype", Value: aggregate},
		{Key: "aggregateid", Value: "poison"},
		{Key: "type", Value: "OrderPlaced"},
		{Key: "payload", Value: []byte("{}")},
		{Key: "key", Value: key},
		{Key: "ts", Value: bson.Timestamp{}},
	}

	// nil removes a field.
	for _, s := range p.set {
		i := slices.IndexFunc(doc, func(element bson.E) bool { return element.Key == s.Key })
		switch {
		case i < 0:
			doc = append(doc, s)
		case s.Value == nil:
			doc = slices.Delete(doc, i, i+1)
		default:
			doc[i] = s
		}
	}
	return doc
}

// inserted is a poisoned envelope in the outbox.
type inserted struct {
	class record.Class
	at    time.Time
}

func runPoison(ctx context.Context, stage *stage) (Finding, error) {
	finding := &PoisonFinding{Classes: map[string]int{}}
	if _, err := stage.startAndAwait(ctx, "owner"); err != nil {
		return finding, err
	}

	good, err := stage.startLoad(ctx, aggregate, "customer", stage.options.Rate, stage.options.Events)
	if err != nil {
		return finding, err
	}
	stage.printEvent("%s good envelopes at %d/s, and one poisoned envelope after every ten",
		formatThousands(stage.options.Events), stage.options.Rate)
	bad, err := stage.insertPoison(ctx, max(stage.options.Events/10, 1))
	finding.Poisoned = len(bad)
	stage.wantDead = len(bad)
	if err = errors.Join(err, good.finishLoad(false)); err != nil {
		return finding, err
	}
	if err := stage.awaitArrival(ctx); err != nil {
		return finding, err
	}

	stage.printEvent("all good ones have arrived")
	// Dead letters may be written later than the good envelopes arrive.
	err = stage.awaitCondition(ctx, "a dead letter of each poisoned envelope", patience, func() bool {
		n, err := stage.countDeadLetters(ctx)
		return err == nil && int(n) >= len(bad)
	})
	if err != nil {
		return finding, err
	}
	return finding, stage.comparePoison(ctx, bad, finding)
}

// insertPoison inserts n poisoned envelopes of all kinds in turn, at a tenth of the rate of the
// good ones.
func (s *stage) insertPoison(ctx context.Context, n int) (map[uuid.UUID]inserted, error) {
	kinds := poisonKinds()
	all := map[uuid.UUID]inserted{}
	tick := time.NewTicker(time.Second * 10 / time.Duration(max(s.options.Rate, 10)))
	defer tick.Stop()

	for i := range n {
		kind := kinds[i%len(kinds)]
		id := uuid.Must(uuid.NewV7())
		// Keys of the load, so that a poisoned envelope could block good ones.
		key := fmt.Sprintf("customer-%d%02d", 1+i%workers, i/workers%customers)
		if _, err := s.outboxCollection().InsertOne(ctx, kind.buildEnvelope(id, key)); err != nil {
			return all, fmt.Errorf("inserting a poisoned envelope: %w", err)
		}
		all[id] = inserted{kind.class, time.Now()}

		select {
		case <-tick.C:
			s.drawProgress()
		case <-ctx.Done():
			return all, context.Cause(ctx)
		}
	}
	return all, nil
}

// comparePoison compares the dead letters with the inserted envelopes.
func (s *stage) comparePoison(ctx context.Context, bad map[uuid.UUID]inserted, finding *PoisonFinding) error {
	list, err := s.deadLetters(ctx)
	if err != nil {
		return err
	}

	for _, l := range list {
		_, data, _ := l.EnvelopeID.BinaryOK()
		id, _ := uuid.FromBytes(data)
		was, ok := bad[id]
		switch {
		case !ok:
			s.recordBroken("a dead letter of %s, which is a good envelope", id)
		case l.Class != was.class:
			s.recordBroken("the dead letter of %s has the class %s, %s expected", id, l.Class, was.class)
		}
		finding.Classes[string(l.Class)]++
		finding.MovedS = max(finding.MovedS, roundSeconds(l.MovedAt.Sub(was.at)))
		delete(bad, id)
	}

	// Envelopes that are left in bad have no dead letter.
	for id, was := range bad {
		s.recordBroken("no dead letter of %s, which is %s", id, was.class)
	}
	if left := s.countWaiting(ctx); left != 0 {
		s.recordBroken("%d envelopes still wait", left)
	}
	return nil
}
