package admin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
)

// Replays may wait for one that cannot go on. The operator has to see which one to cancel.
func TestAFullQueueNamesTheActiveReplays(t *testing.T) {
	t.Parallel()
	runner := newReplayRunner()
	runner.running = true
	runner.active["first"], runner.active["second"] = context.CancelFunc(nil), context.CancelFunc(nil)
	for i := range maxQueuedReplays {
		if err := runner.enqueueJob(replayJob{id: fmt.Sprint(i)}); err != nil {
			t.Fatal(err)
		}
	}

	for _, err := range []error{runner.enqueueJob(replayJob{id: "more"}), runner.checkCapacity()} {
		if !errors.Is(err, ErrReplaysFull) || !strings.Contains(err.Error(), "first, second") {
			t.Errorf("%v", err)
		}
	}
}
