package consumer

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/inbox"
)

// A record that was decoded when it was read at first, and cannot be when it is read again, is a failure of its handler: the
// handler never gets the message undecoded.
func TestAMessageThatCannotBeDecodedWhenReadAgainIsNotHandled(t *testing.T) {
	t.Parallel()
	calls := 0
	handler := HandlerFunc(func(context.Context, *Message) error { calls++; return nil })
	reg := &registration{chained: handler}
	reg.name, reg.mode, reg.timeout = "h", inbox.None, time.Minute
	s := &session{run: &run{}}
	s.c = &Consumer{poison: &registration{system: true}}
	p := &partition{s: s, fetched: 6}
	tr := &track{p: p, reg: reg, running: true} // so that the test, not the track, calls the handler
	p.tracks = map[trackKey]*track{{0, "h"}: tr}
	p.entries = []*entry{{offset: 5, parts: []part{{reg: reg}}, open: 1}} // shed before a rewind

	broken := errors.New("no key to decrypt it")
	p.add(&entry{offset: 5, m: &Message{}, cause: broken, parts: []part{{reg: p.s.c.poison}}, open: 1})

	if len(tr.queue) != 1 {
		t.Fatalf("%d messages are queued, want 1", len(tr.queue))
	}
	err := tr.runHandler(t.Context(), tr.queue, nil, &attemptResult{})
	if _, ofHandler := errors.AsType[*handlerFailure](err); !ofHandler || !errors.Is(err, broken) {
		t.Errorf("call returned %v, want a failure of the handler with the cause", err)
	}
	if calls != 0 {
		t.Error("the handler got a message that was not decoded")
	}
}
