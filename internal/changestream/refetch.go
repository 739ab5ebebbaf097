package changestream

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/resume"
)

// ErrNotInStream says that the event looked for is not in the stretch of the stream that was read.
var ErrNotInStream = errors.New("not in the change stream")

// Refetch reads the stream again behind a position until match accepts an event, and returns a copy of that event's
// document: the image of an envelope that is no longer in its collection. It gives up with ErrNotInStream at the cluster's time of
// the call, and returns the server's error if the history is gone. It opens a stream of its own and may run beside Run.
func (s *Stream) Refetch(ctx context.Context, after resume.Position, match func(*Event) bool) ([]byte, error) {
	end, err := OperationTime(ctx, s.cfg.Client)
	if err != nil {
		return nil, err
	}
	opts := s.options()
	if t, ok := after.Time(); after.Token.IsZero() {
		if !ok {
			return nil, ErrNoStart
		}
		opts.SetStartAtOperationTime(&t)
	} else {
		opts.SetStartAfter(bson.Raw(after.Token))
	}
	c, err := s.watch(ctx, append(s.cfg.Scope.Pipeline(), slimStage), opts)
	if err != nil {
		return nil, fmt.Errorf("opening stream to read an event again: %w", err)
	}
	defer c.close()
	c.cs.SetBatchSize(firstDocuments)
	b := newBatch()
	defer b.Release()
	for ctx.Err() == nil {
		b.reset()
		if err := c.fetch(s.cfg.MaxAwait+maxPatience, b); err != nil {
			return nil, fmt.Errorf("reading an event again: %w", err)
		}
		doc, err := s.find(ctx, b, match)
		if doc != nil || err != nil {
			return doc, err
		}
		t, ok := resume.Token(c.cs.ResumeToken()).ClusterTime()
		read := ok && (t.After(end) || len(b.Docs) == 0 && !t.Before(end))
		if read || c.cs.ID() == 0 {
			return nil, ErrNotInStream
		}
	}
	return nil, context.Cause(ctx)
}

// find is a copy of the document of the first event in b that matches.
func (s *Stream) find(ctx context.Context, b *Batch, match func(*Event) bool) ([]byte, error) {
	var ev Event
	for _, raw := range b.Docs {
		if err := Parse(raw, &ev); err != nil {
			return nil, err
		}
		if ev.Op != Insert || !match(&ev) {
			continue
		}
		if ev.HasDocument {
			return slices.Clone(ev.Document), nil
		}
		doc, err := s.document(ctx, &ev)
		if err == nil && doc == nil {
			err = fmt.Errorf("%w: %s", ErrNotInStream, goneNote)
		}
		return doc, err
	}
	return nil, nil
}
