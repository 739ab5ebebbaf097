package waiting

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
)

func TestN15_LoadFindsGatesAndRepeatedEvents(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.insert(
		h.newException(1, "k", "parked", bson.E{Key: "pending", Value: bson.A{"a", "b"}}), h.newException(2, "k", "blocked"),
		h.newException(3, "q", "retry"), h.newException(4, "q", "retry", bson.E{Key: "origin", Value: "requeue"}),
		h.newException(5, "x", "parked", bson.E{Key: "pending", Value: nil}, bson.E{Key: "key", Value: int64(7)}),
		bson.D{{Key: "_id", Value: "healthy"}},
	)

	te := h.newTerm()
	defer te.out.kill(nil)
	gates, known := map[string]int{}, []string{}
	n, err := te.x.Load(t.Context(), func(pos string) bool { return pos > "82000002" },
		func(ns, topic, key string) { gates[ns[len(h.db.Name()):]+" "+topic+" "+key]++ },
		func(_ string, id bson.RawValue, _ []string) { known = append(known, id.StringValue()) })
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int{".outbox a k": 2, ".outbox b k": 1, ".outbox a q": 1, ".outbox  7": 1}
	if !maps.Equal(gates, want) || n != (Loaded{Exceptions: 5, Gates: 5, Known: 2}) {
		t.Errorf("%+v, gates %v, want %v", n, gates, want)
	}
	if slices.Sort(known); !slices.Equal(known, []string{"e000003", "e000005"}) {
		t.Errorf("known: %v", known)
	}
}

func TestN08_RecoverFinishesEnvelopesOfAnEarlierOwner(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.recording = "mark"
	both := bson.E{Key: "pending", Value: bson.A{"a", "b"}}
	oid := bson.NewObjectID()
	claim := bson.E{Key: "claim", Value: bson.D{{Key: "token", Value: "t"}, {Key: "epoch", Value: int64(1)}}}
	scheduled := bson.D{
		{Key: "_id", Value: "due"},
		{Key: "aggregatetype", Value: "o"},
		{Key: "aggregateid", Value: "s"},
		{Key: "type", Value: "T"},
		{Key: "dueAt", Value: time.UnixMilli(7)},
		claim,
	}
	h.insert(
		h.newException(1, "k", "parked", both), h.newException(2, "k", "parked", both), h.newException(3, "k", "retry", bson.E{Key: "delivery", Value: int32(2)}),
		h.newException(4, "k", "parked"), h.newException(5, "k", "parked", bson.E{Key: "_id", Value: oid}), scheduled,
		// The clock of the primary has gone back since this envelope was claimed.
		bson.D{
			{Key: "_id", Value: "due again"},
			{Key: "aggregatetype", Value: "o"},
			{Key: "aggregateid", Value: "s"},
			{Key: "type", Value: "T"},
			{Key: "dueAt", Value: time.Now().Add(20 * time.Second)},
			claim,
		},
		bson.D{{Key: "_id", Value: "stream's"}},
	)

	te := h.newTerm()
	defer te.out.kill(nil)
	found := func(topicsOf map[any][]string) FindHits {
		return func(e *outboxes.Envelope, _ []string) (hits []record.Answer, all []string) {
			var id any
			if err := e.Raw.Lookup("_id").Unmarshal(&id); err != nil {
				t.Error(err)
			}
			for _, topic := range topicsOf[id] {
				hits = append(hits, record.Answer{Topic: topic, Partition: 3, Offset: 11})
			}
			return hits, []string{"a"}
		}
	}

	n, err := te.x.FinishSent(t.Context(), found(map[any][]string{"e000001": {"a", "b"}, "e000002": {"b"}, "due": {"a"}, "due again": {"a"}, "stream's": {"a"}}))
	if err != nil || n != 4 {
		t.Fatalf("%d, %v", n, err)
	}
	if d := h.findDocument("e000001"); d["state"] != nil || d["sentAt"] == nil || len(d["sent"].(bson.A)) != 2 {
		t.Errorf("all of it was there: %v", d)
	}
	if d := h.findDocument("e000002"); d["state"] != "parked" || fmt.Sprint(d["pending"]) != "[a]" {
		t.Errorf("half of it was there: %v", d)
	}
	for _, id := range []string{"due", "due again"} {
		if d := h.findDocument(id); d["sentAt"] == nil || d["claim"] != nil || d["dueAt"] != nil || d["scheduledFor"] == nil {
			t.Errorf("a scheduled one: %v", d)
		}
	}
	if left := h.countLeft(); left != 4 {
		t.Errorf("%d exceptions are left", left)
	}
	if h.findDocument("stream's")["sentAt"] != nil {
		t.Error("an envelope of the stream was touched")
	}

	n, err = te.x.FinishSent(t.Context(), found(map[any][]string{oid: {"a"}, "e000003": {"a"}}))
	if err != nil || n != 2 {
		t.Errorf("an ObjectId and a later delivery: %d, %v", n, err)
	}
	if len(te.out.opened) > 0 || len(te.out.settled) > 0 {
		t.Error("gates or tickets of an earlier owner were given free")
	}
	counts, err := te.x.Counts(t.Context())
	if err != nil || len(counts) != 1 || counts[0].State != "parked" || counts[0].Topic != "a" || counts[0].N != 2 {
		t.Errorf("counts: %+v, %v", counts, err)
	}
}

// TestN10_ALaterExceptionIsNotFinishedBeforeAnEarlierOneOfItsKey in a compacted topic, where the record of the earlier one may have
// been removed: it is sent again, and the later one behind it.
func TestN10_ALaterExceptionIsNotFinishedBeforeAnEarlierOneOfItsKey(t *testing.T) {
	t.Parallel()
	for compacted, want := range map[bool]string{true: "[e000001 e000004]", false: "[e000001 e000003 e000004]"} {
		t.Run(fmt.Sprint("compacted ", compacted), func(t *testing.T) {
			t.Parallel()
			h := newScene(t)
			pending := bson.E{Key: "pending", Value: bson.A{"a"}}
			h.insert(h.newException(1, "k", "parked", pending), h.newException(2, "k", "parked", pending), h.newException(3, "k", "parked", pending), h.newException(4, "l", "parked", pending))
			for i, key := range map[int]string{1: "k", 3: "k", 4: "l"} {
				h.broker.appendRecord("a", fmt.Sprintf("e%06d", i), key, 0)
			}

			te := h.newTerm()
			defer te.out.kill(nil)
			te.out.routes = []string{"a"}
			te.x.config.Compacted = func(string) bool { return compacted }
			if _, err := te.x.FinishSent(t.Context(), te.out.findHits); err != nil {
				t.Fatal(err)
			}

			var ids []string
			for i := 1; i <= 4; i++ {
				if id := fmt.Sprintf("e%06d", i); h.findDocument(id)["state"] == nil {
					ids = append(ids, id)
				}
			}
			if fmt.Sprint(ids) != want {
				t.Errorf("finished are %v, want %s", ids, want)
			}
		})
	}
}

func TestAFateThatTheServerDoesNotTakeHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	var docs []bson.D
	for i := range 20 {
		docs = append(docs, h.newException(i, fmt.Sprint("k", i), "parked"))
	}
	h.insert(docs...)
	validator := bson.D{{Key: "$or", Value: bson.A{bson.D{{Key: "_id", Value: bson.D{{Key: "$ne", Value: "e000007"}}}}, bson.D{{Key: "sentAt", Value: nil}}}}}
	if err := h.db.RunCommand(t.Context(), bson.D{{Key: "collMod", Value: "outbox"}, {Key: "validator", Value: validator}}).Err(); err != nil {
		t.Fatal(err)
	}

	te := h.newTerm().run()
	h.waitUntil("the others are finished", func() bool { return h.countLeft() == 1 && te.x.InFlight() == 1 })
	if err := h.db.RunCommand(t.Context(), bson.D{{Key: "collMod", Value: "outbox"}, {Key: "validator", Value: bson.D{}}}).Err(); err != nil {
		t.Fatal(err)
	}
	te.f.retryPostponed()
	retry.Signal(te.f.wake)
	h.waitEmpty()
	te.waitWritten()
	h.broker.checkOrder()
	te.out.checkSettled()
}
