package fence

import (
	"bytes"
	"fmt"

	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

// Tail is what was read of one partition.
type Tail struct {
	// From is the offset it was read from, to be kept as the stored offset: the one that was stored, or the start of
	// the log where that was out of range.
	From int64
	// Next is the offset after the last that was read. Nothing of an earlier sender stands at or above it.
	Next int64
	// Hits are the deliveries of ours in it.
	Hits *Known
	// OutOfRange says that the stored offset was not in the log; Truncated that a stretch was skipped for the bound. What
	// is sent again after either may be a duplicate, and is to be flagged so.
	OutOfRange, Truncated bool

	alias  Alias
	marks  map[int64]int16 // highest epoch of a control batch, by producer id
	target int64           // high watermark when it was first read; -1 before
	bytes  int64
	span   int64 // offsets walked, jumps excluded
}

func newTail(from int64) *Tail {
	return &Tail{From: max(from, 0), Next: max(from, 0), Hits: &Known{}, marks: map[int64]int16{}, target: -1}
}

// above reports whether a marker above each of senders was read.
func (t *Tail) above(senders []Producer) bool {
	for _, s := range senders {
		if e, seen := t.marks[s.ID]; !seen || e <= s.Epoch {
			return false
		}
	}
	return true
}

// walk takes what a fetch brought, batch by batch. Batches that end below Next (a fetch begins with a whole batch) are
// passed over. The next offset after a batch comes from its last offset delta: a compacted batch ends with a hole.
func (t *Tail) walk(set []byte, ours map[int64]bool, scratch *bytes.Buffer) error {
	for b, err := range fetched.Batches(set) {
		switch {
		case err != nil:
			return err
		case b.Format < fetched.Format: // messages from before producer ids: nobody of ours
			t.pass(b.Base + 1)
			continue
		case b.End <= t.Next:
			continue
		case b.Control:
			if e, seen := t.marks[b.Producer]; !seen || b.Epoch > e {
				t.marks[b.Producer] = b.Epoch
			}
		case ours[b.Producer]:
			if err := t.records(&b, scratch); err != nil {
				return fmt.Errorf("%w at offset %d: %w", fetched.ErrCorrupt, b.Base, err)
			}
		}
		t.pass(b.End)
	}
	return nil
}

func (t *Tail) pass(next int64) {
	if next > t.Next {
		t.span += next - t.Next
		t.Next = next
	}
}

// records remembers the deliveries of one of our batches.
func (t *Tail) records(b *fetched.Batch, scratch *bytes.Buffer) error {
	list, err := b.Records(scratch)
	if err != nil {
		return err
	}
	var x fetched.Record
	for {
		more, err := list.Next(&x)
		if err != nil || !more {
			return err
		}
		if id, ok := t.alias.identityOf(x.Headers); ok && x.Offset >= t.Next {
			t.Hits.Add(id, x.Offset)
		}
	}
}
