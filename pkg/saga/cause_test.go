package saga_test

import (
	"context"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/saga"
)

// causesBySubject returns the causes of the stored events, by their subject.
func (p *place) causesBySubject(t *testing.T) map[string]event.Cause {
	t.Helper()
	raws, err := p.listEnvelopes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	causes := map[string]event.Cause{}

	for _, raw := range raws {
		var doc struct {
			Subject string
			Headers []struct {
				K string
				V []byte
			}
		}
		if err := bson.Unmarshal(raw, &doc); err != nil {
			t.Fatal(err)
		}
		var cause event.Cause
		for _, header := range doc.Headers {
			switch header.K {
			case event.HeaderCorrelationID:
				cause.CorrelationID = string(header.V)
			case event.HeaderCausationID:
				cause.CausationID = string(header.V)
			}
		}
		causes[doc.Subject] = cause
	}
	return causes
}

// A held message is the cause of the events of its step, and not the message that releases it.
func TestEventsOfAStepHaveTheCauseOfItsMessage(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	emit := func(_ context.Context, in *saga.Instance[ledger], n int64) error {
		subject := event.WithSubject("of " + in.Message().ID)
		in.Emit(event.New(event.Aggregate{Type: "t", ID: "a"}, "Counted", event.Payload{}, subject))
		if n == 3 {
			in.Emit(event.New(event.Aggregate{Type: "t", ID: "a"}, "Counted", event.Payload{}, event.WithSubject("own"), event.WithCause(event.Cause{CausationID: "own"})))
		}
		return nil
	}
	h := handlerOf(t, sequence(emit), p.box)

	var list []*consumer.Message
	want := map[string]event.Cause{}
	for _, n := range []int64{3, 2, 1} {
		m := numberedMsg(t, n)
		m.ID = []string{"", "one", "two", "three"}[n]
		m.SetHeader(event.HeaderCorrelationID, []byte("conversation of "+m.ID))
		list = append(list, m)
		want["of "+m.ID] = event.Cause{CorrelationID: "conversation of " + m.ID, CausationID: m.ID}
	}
	want["own"] = event.Cause{CorrelationID: "conversation of three", CausationID: "own"}
	mustHandle(t, h, list...)

	got := p.causesBySubject(t)
	for subject, cause := range want {
		if got[subject] != cause {
			t.Errorf("event %s: cause %+v, want %+v", subject, got[subject], cause)
		}
	}
	if len(got) != len(want) {
		t.Errorf("events: got %+v, want %+v", got, want)
	}
}
