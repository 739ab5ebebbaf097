package consumer

import (
	"fmt"
	"testing"
	"time"
)

func TestATypeWithoutAHandlerHasALineAMinute(t *testing.T) {
	t.Parallel()
	var types unknownTypes
	start := time.Unix(1_700_000_000, 0)
	for _, step := range []struct {
		after time.Duration
		typ   string
		want  int // 0: no line
	}{
		{0, "a", 1}, {time.Second, "a", 0}, {time.Second, "b", 1}, {unknownInterval - 1, "a", 0}, {unknownInterval, "a", 3}, {unknownInterval + 1, "a", 0},
	} {
		letters, due := types.countLetter(step.typ, start.Add(step.after))
		if letters != step.want || due != (step.want > 0) {
			t.Errorf("type %s after %v: got %d letters (%t), want %d", step.typ, step.after, letters, due, step.want)
		}
	}

	// Producers choose the types, so all above a limit share one count.
	for i := range maxCachedTypes + 10 {
		types.countLetter(fmt.Sprint("type ", i), start)
	}
	if n := len(types.types); n != maxCachedTypes+1 {
		t.Errorf("%d types are kept, want %d", n, maxCachedTypes+1)
	}
}
