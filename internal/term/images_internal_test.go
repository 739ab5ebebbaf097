package term

import (
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/gap"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/record"
)

// TestN15_AnEnvelopeThatTwoTopicsRejectWaitsForBoth: Kafka rejects the records of one envelope for two topics, and both
// exceptions are in one batch.
func TestN15_AnEnvelopeThatTwoTopicsRejectWaitsForBoth(t *testing.T) {
	t.Parallel()
	cfg := config.Default()
	x := &exceptionWriter{cfg: &cfg, recovery: &gap.Recovery{}}
	raw, err := bson.Marshal(bson.D{{Key: "_id", Value: "e-1"}})
	if err != nil {
		t.Fatal(err)
	}

	for name, states := range map[string][2]string{
		"both rejected":         {envelope.StateRetry, envelope.StateRetry},
		"parked, then rejected": {envelope.StateParked, envelope.StateRetry},
		"rejected, then parked": {envelope.StateRetry, envelope.StateParked},
	} {
		var list []pipeline.Exception
		for i, topic := range []string{"a", "b"} {
			list = append(list, pipeline.Exception{
				NS: "shop.outbox", Raw: raw, Pos: "01", Key: "k", State: states[i], Pending: []string{topic}, Topic: topic,
				Refusal: record.Refusal{Class: "rejected", Reason: "rejected"},
			})
		}

		waiting := x.appendWaiting(x.appendWaiting(nil, &list[0]), &list[1])
		if len(waiting) != 1 {
			t.Fatalf("%s: %d waiting envelopes, want 1", name, len(waiting))
		}
		slices.Sort(waiting[0].Pending)
		if got, want := waiting[0].Pending, []string{"a", "b"}; !slices.Equal(got, want) || waiting[0].State != envelope.StateRetry {
			t.Errorf("%s: pending %q in state %q, want %q in state %q", name, got, waiting[0].State, want, envelope.StateRetry)
		}
	}
}
