package consumer

import (
	"context"
	"errors"
	"testing"
	"time"
)

// A record may be decoded the first time and fail to decode when it is fetched again. That is a failure
// of its handler. The handler never gets the message undecoded.
func TestAMessageThatCannotBeDecodedWhenReadAgainIsNotHandled(t *testing.T) {
	t.Parallel()

	calls := 0
	handler := HandlerFunc(func(context.Context, *Message) error { calls++; return nil })
	reg := &registration{chained: handler}
	reg.name, reg.mode, reg.timeout = "h", AtLeastOnce, time.Minute

	s := &session{run: &run{}}
	s.c = &Consumer{poison: &registration{system: true}}
	p := &partition{s: s, fetchedTo: 6}

	// The track counts as running, so that the test calls the handler and the track does not.
	tr := &track{p: p, reg: reg, running: true}
	p.tracks = map[trackKey]*track{{0, "h"}: tr}

	// The body of the entry was dropped.
	p.entries = []*entry{{offset: 5, shares: []share{{reg: reg}}, openShares: 1}}

	broken := errors.New("no key to decrypt it")
	p.addEntryLocked(&entry{
		offset: 5, m: &Message{}, decodeErr: broken, shares: []share{{reg: p.s.c.poison}}, openShares: 1,
	})
	if len(tr.queue) != 1 {
		t.Fatalf("queued messages: got %d, want 1", len(tr.queue))
	}

	err := tr.runHandler(t.Context(), tr.queue, nil, &attemptResult{})
	if _, ofHandler := errors.AsType[*handlerFailure](err); !ofHandler || !errors.Is(err, broken) {
		t.Errorf("runHandler: got %v, want a handlerFailure with the cause %v", err, broken)
	}
	if calls != 0 {
		t.Errorf("handler calls: got %d, want 0", calls)
	}
}
