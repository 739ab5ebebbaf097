package consumer

import (
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/pkg/event"
)

func TestInvalidRetryHeadersAreIgnored(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"", "a/b", "a/x/1", "a/1/x", "a/1/2/3"} {
		m := &Message{Topic: "own", Headers: []event.Header{{Key: record.HeaderRetryOrigin, Value: []byte(bad)}}}
		if o := originOf(m); o.Topic != "own" {
			t.Errorf("origin of header %q: got %v, want the own place", bad, o)
		}
	}

	m := &Message{Headers: []event.Header{{Key: record.HeaderRetryHistory, Value: []byte("not JSON")}, {Key: record.HeaderDeliverBy, Value: []byte("soon")}}}
	if h := failureHistory(m, verdict{}); len(h) != 0 {
		t.Errorf("history of an invalid header: got %v, want none", h)
	}
	if err := checkTimes(m, time.Now()); err != nil {
		t.Errorf("checkTimes with an invalid deadline: got %v, want nil", err)
	}
}
