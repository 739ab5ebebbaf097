package fence

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

// Tail is the part of one partition that was read back.
type Tail struct {
	// From is the offset at which the read began, to be kept as the stored offset. It is the offset that
	// was stored, or the start of the log if that was out of range.
	From int64
	// Next is the offset after the last one that was read. No record of an earlier sender is at or above
	// it.
	Next int64
	// Markers is the number of control records between From and Next: markers of takeovers and of transactions.
	Markers int64
	// Hits are the deliveries of the relay in the tail.
	Hits *Known
	// OutOfRange means that the stored offset was not in the log. Truncated means that a part was skipped,
	// because of a bound or because it cannot be read. After either, a record that is sent again may be
	// a duplicate, and must be flagged so.
	OutOfRange, Truncated bool

	marks   map[int64]int16 // the highest epoch of a control batch or of a foreign batch, by producer id
	foreign map[int64]int16 // the highest epoch of a batch that the relay has not sent, by producer id of the relay
	target  int64           // the high watermark at the first read, or -1 before
	bytes   int64
	room    *atomic.Int64 // the number of hits for which the tails of a read have memory; nil: any number
}

func newTail(from int64) *Tail {
	return &Tail{
		From: max(from, 0), Next: max(from, 0), Hits: &Known{}, marks: map[int64]int16{}, foreign: map[int64]int16{}, target: -1,
	}
}

// hasMarkersAbove reports whether a marker above each of the producers was read.
func (t *Tail) hasMarkersAbove(list []Producer) bool {
	for _, p := range list {
		if epoch, seen := t.marks[p.ID]; !seen || epoch <= p.Epoch {
			return false
		}
	}
	return true
}

// corruptError means that a batch at or after Next cannot be read.
type corruptError struct {
	base int64
	end  int64 // the offset after the batch; not above base if it is unknown
	err  error
}

func (e *corruptError) Error() string { return e.err.Error() }

func (e *corruptError) Unwrap() error { return e.err }

// readSet reads the batches of a fetch. It stops at a batch that cannot be read, with a *corruptError. A
// fetch begins with a whole batch, so batches that end at or below Next are skipped. The offset after a
// batch comes from its last offset delta, because a compacted batch ends with a hole.
//
// ours has the producer ids of the relay, with the highest epoch that the relay has of each.
func (t *Tail) readSet(set []byte, ours map[int64]int16) error {
	var corrupt *corruptError
	anyBatch := false
	for b, err := range fetched.Batches(set) {
		anyBatch = true
		switch {
		case err != nil:
			if corrupt == nil {
				corrupt = &corruptError{base: b.Base, end: b.End, err: err}
			}
			continue
		case corrupt != nil && b.Base > t.Next:
			// An intact batch shows best where the corrupt ones end.
			corrupt.end = b.Base
			return corrupt
		}

		// Corrupt batches that end at or below Next do not matter.
		corrupt = nil
		if err := t.readBatch(&b, ours); err != nil {
			err = fmt.Errorf("%w at offset %d: %w", fetched.ErrCorrupt, b.Base, err)
			return &corruptError{base: b.Base, end: b.End, err: err}
		}
	}

	// The first batch of a fetch is always whole, so its length must be wrong. Each set begins with the
	// offset of its first batch.
	if !anyBatch && len(set) >= 8 {
		base := int64(binary.BigEndian.Uint64(set))
		corrupt = &corruptError{base: base, err: fmt.Errorf("%w at offset %d: its length is wrong", fetched.ErrCorrupt, base)}
	}
	if corrupt != nil {
		return corrupt
	}
	return nil
}

// readBatch reads one batch. The error means that the records of one of the relay's batches cannot be
// read.
func (t *Tail) readBatch(batch *fetched.Batch, ours map[int64]int16) error {
	highest, isOurs := ours[batch.Producer]
	switch {
	case batch.Format < fetched.Format:
		// Messages from before producer ids are not records of the relay.
		t.Next = max(t.Next, batch.Base+1)
		return nil
	case batch.End <= t.Next:
		return nil
	case batch.Control:
		t.Markers += batch.End - max(batch.Base, t.Next)
		raiseEpoch(t.marks, batch.Producer, batch.Epoch)
	case isOurs:
		if err := t.addHits(batch); err != nil {
			return err
		}

		// Kafka rejects lower epochs after this batch as it does after a marker, and also the relay's own markers.
		if batch.Epoch > highest {
			raiseEpoch(t.marks, batch.Producer, batch.Epoch)
			raiseEpoch(t.foreign, batch.Producer, batch.Epoch)
		}
	}

	t.Next = batch.End
	return nil
}

func raiseEpoch(epochs map[int64]int16, id int64, epoch int16) {
	if have, seen := epochs[id]; !seen || epoch > have {
		epochs[id] = epoch
	}
}

// timeOf returns the time that the relay has given to a record, or AnyTime if the broker has replaced it.
func timeOf(batch *fetched.Batch, record *fetched.Record) int64 {
	if batch.HasAppendTime() {
		return AnyTime
	}
	return record.TimeMS
}

// addHits adds the deliveries of a batch that the relay has sent.
func (t *Tail) addHits(batch *fetched.Batch) error {
	list, err := batch.Stream()
	if err != nil {
		return err
	}
	defer list.Close()

	var record fetched.Record
	for {
		more, err := list.Next(&record, t.Next)
		if _, tooLarge := errors.AsType[*fetched.TooLargeError](err); tooLarge {
			// The relay sends no record that large, so another client writes with its producer id, or an unknown
			// version has sent it. In doubt, it is the record that is sent again.
			t.Truncated = true
			continue
		}
		if err != nil || !more {
			return err
		}
		id, ok := IdentityOf(record.Headers)
		if !ok || record.Offset < t.Next {
			continue
		}

		// I7: a small compressed batch can have more records than fit into the memory.
		if t.room != nil && t.room.Add(-1) < 0 {
			t.Truncated = true
			continue
		}
		t.Hits.Add(id, record.Offset, timeOf(batch, &record))
	}
}
