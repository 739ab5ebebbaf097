package changestream

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/resume"
)

// ErrNotInStream says that the event looked for is not in the stretch of the stream that was read.
var ErrNotInStream = errors.New("not in the change stream")

// Lost reports whether an error of Refetch says that what it looked for cannot be read again. Any other is of the moment, such as
// an election: the images are there still.
func Lost(err error) bool {
	if errors.Is(err, ErrNotInStream) || errors.Is(err, ErrNoStart) {
		return true
	}
	c, _, _ := classify(err)
	return c == classGap || c == classOversize
}

// Refetch reads the stream again behind a position and hands take the documents of the inserts that want accepts, until
// take returns false: the images of envelopes that may be no longer in their collection. Event and document are valid
// during the call. It ends with ErrNotInStream at the cluster's time of the call, and with the server's error if the
// history is gone. It opens a stream of its own and may run beside Run.
func (s *Stream) Refetch(ctx context.Context, after resume.Position, want func(*Event) bool, take func(ev *Event, document []byte) (more bool)) error {
	end, err := mongodb.ClusterTime(ctx, s.cfg.Client)
	if err != nil {
		return err
	}
	opts := s.options()
	if t, ok := after.Time(); after.Token.IsZero() {
		if !ok {
			return ErrNoStart
		}
		opts.SetStartAtOperationTime(&t)
	} else {
		opts.SetStartAfter(bson.Raw(after.Token))
	}
	c, err := s.watch(ctx, append(s.cfg.Scope.Pipeline(), slimStage), opts)
	if err != nil {
		return fmt.Errorf("opening stream to read events again: %w", err)
	}
	defer c.close()
	c.cs.SetBatchSize(firstDocuments)
	b := newBatch()
	defer b.Release()
	for ctx.Err() == nil {
		b.reset()
		if err := c.fetch(s.cfg.MaxAwait+maxPatience, b); err != nil {
			return fmt.Errorf("reading events again: %w", err)
		}
		if more, err := s.find(ctx, b, want, take); err != nil || !more {
			return err
		}
		t, ok := resume.Token(c.cs.ResumeToken()).ClusterTime()
		read := ok && (t.After(end) || len(b.Docs) == 0 && !t.Before(end))
		if read || c.cs.ID() == 0 {
			return ErrNotInStream
		}
	}
	return context.Cause(ctx)
}

// find hands on what is wanted of a batch. A document that was too large for its event, and is gone, is passed over.
func (s *Stream) find(ctx context.Context, b *Batch, want func(*Event) bool, take func(*Event, []byte) bool) (more bool, err error) {
	var ev Event
	for _, raw := range b.Docs {
		if err := Parse(raw, &ev); err != nil {
			return false, err
		}
		if ev.Op != Insert || !want(&ev) {
			continue
		}
		doc := ev.Document
		if !ev.HasDocument {
			if doc, err = s.document(ctx, &ev); err != nil {
				return false, err
			}
		}
		if doc != nil && !take(&ev, doc) {
			return false, nil
		}
	}
	return true, nil
}
