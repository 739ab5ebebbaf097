package inbox_test

import (
	"context"
	"testing"
)

// TestMarksNeedFewAllocations is not parallel, because it counts the allocations of the process.
func TestMarksNeedFewAllocations(t *testing.T) {
	b := setup(t)
	const size, most = 100, 60
	var offset int64
	perBatch := testing.AllocsPerRun(5, func() {
		list := newBatch("", size, offset)
		offset += size
		err := b.transaction(t.Context(), func(ctx context.Context) error {
			_, err := b.inbox.AdmitNew(ctx, list)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	})
	if perBatch > size*most {
		t.Errorf("%.0f allocations for %d messages, want at most %d for each", perBatch, size, most)
	}
}
