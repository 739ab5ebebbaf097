package event_test

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/outrelay/outrelay/pkg/event"
)

func TestACauseBecomesHeaders(t *testing.T) {
	t.Parallel()
	cause := event.Cause{CorrelationID: "c-1", CausationID: "m-1"}
	e := event.New(about, "T", event.Payload{}, event.WithHeader("a", nil), event.WithHeader(event.HeaderCausationID, []byte("old")), event.WithCause(cause))
	want := []event.Header{{Key: "a"}, {Key: "correlation-id", Value: []byte("c-1")}, {Key: "causation-id", Value: []byte("m-1")}}
	if diff := cmp.Diff(want, e.Headers()); diff != "" || e.Cause() != cause {
		t.Errorf("%+v\n%s", e.Cause(), diff)
	}

	// An empty field changes nothing, and the original stays as it was.
	half := e.With(event.WithCause(event.Cause{CorrelationID: "c-2"}))
	if half.Cause() != (event.Cause{CorrelationID: "c-2", CausationID: "m-1"}) || e.Cause() != cause {
		t.Errorf("%+v, and %+v of the original", half.Cause(), e.Cause())
	}
	if got := event.New(about, "T", event.Payload{}); got.Cause() != (event.Cause{}) || len(got.Headers()) != 0 {
		t.Errorf("an event without a cause has %+v", got.Headers())
	}
}

func TestAContextHasACause(t *testing.T) {
	t.Parallel()
	cause := event.Cause{CorrelationID: "c-1"}
	if got := event.CauseFromContext(event.ContextWithCause(t.Context(), cause)); got != cause {
		t.Errorf("%+v", got)
	}
	if got := event.CauseFromContext(context.Background()); got != (event.Cause{}) {
		t.Errorf("%+v", got)
	}
	if got := cause.Or(event.Cause{CorrelationID: "other", CausationID: "m"}); got != (event.Cause{CorrelationID: "c-1", CausationID: "m"}) {
		t.Errorf("%+v", got)
	}
}
