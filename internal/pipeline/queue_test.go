package pipeline

import (
	"context"
	"slices"
	"testing"
)

// One read prepares all queued outcomes, but a transaction has a limit.
func TestOutcomesArePreparedTogetherAndRecordedInParts(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	q := newRecordQueue[int]()
	for i := range 2*maxRecorded + 500 {
		q.add(i)
	}

	var prepared, recorded []int
	next := 0
	err := q.run(ctx, func(list []int) error {
		prepared = append(prepared, len(list))
		return nil
	}, func(batch []int) error {
		recorded = append(recorded, len(batch))
		for _, i := range batch {
			if i != next {
				t.Fatalf("recorded %d, want %d", i, next)
			}
			next++
		}
		if next == 2*maxRecorded+500 {
			cancel()
		}
		return nil
	})
	if err != nil || !slices.Equal(prepared, []int{2500}) || !slices.Equal(recorded, []int{1000, 1000, 500}) {
		t.Errorf("prepared %v, recorded %v, error %v", prepared, recorded, err)
	}
}
