package changestream

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/resume"
)

// errNotInStream means that the requested event is not in the part of the stream that was read.
var errNotInStream = errors.New("not in the change stream")

// Lost reports whether an error of Refetch means that the requested events cannot be read again.
// Every other error is temporary, for example an election: the events still exist.
func Lost(err error) bool {
	if errors.Is(err, errNotInStream) || errors.Is(err, errNoStart) {
		return true
	}

	class, _, _ := classifyError(err)
	return class == classGap || class == classOversize
}

// Refetch reads the stream again from a position on, to get the images of envelopes that may no
// longer be in their collection. It calls take with the document of each insert that want accepts,
// until take returns false. The event and the document are valid only during the call.
//
// If it reaches the cluster time at which it was called, it returns errNotInStream. If the history is
// gone, it returns the server's error. If a response takes too long, it returns [ErrTimeout], and the next
// call waits for twice as long. It opens another stream, so it may be called during Run. Calls must not
// overlap.
func (s *Stream) Refetch(
	ctx context.Context, position resume.Position,
	want func(*changes.Event) bool, take func(ev *changes.Event, document []byte) (more bool),
) error {
	end, err := mongodb.ClusterTime(ctx, s.cfg.Client)
	if err != nil {
		return err
	}

	opts := s.streamOptions()
	if timestamp, ok := position.Time(); position.Token.IsZero() {
		if !ok {
			return errNoStart
		}
		opts.SetStartAtOperationTime(&timestamp)
	} else {
		opts.SetStartAfter(bson.Raw(position.Token))
	}
	// Large documents are fetched by _id, so that one of them cannot fail a whole response (N24).
	cursor, err := s.openChangeStream(ctx, append(s.pipeline(), slimStage), opts)
	if err != nil {
		return fmt.Errorf("opening stream to read events again: %w", err)
	}
	defer cursor.closeCursor()
	cursor.changeStream.SetBatchSize(firstDocuments)

	// A response that is lost with its connection must not stop the caller. But the server may also search a
	// long backlog before it responds. With a fixed limit, it would begin its search again forever.
	patience := max(s.refetchPatience, s.pace.patience)
	s.refetchPatience = 0

	batch := changes.NewBatch()
	defer batch.Release()
	for ctx.Err() == nil {
		batch.Clear()
		if err := cursor.fetchResponse(s.pace.maxAwait+patience, batch); err != nil {
			if errors.Is(err, changes.ErrTimeout) {
				s.refetchPatience = min(2*patience, maxPatience)
			}
			return fmt.Errorf("reading events again: %w", err)
		}
		if more, err := s.visitInserts(ctx, batch, want, take); err != nil || !more {
			return err
		}

		timestamp, ok := resume.Token(cursor.changeStream.ResumeToken()).ClusterTime()
		reachedEnd := ok && (timestamp.After(end) || len(batch.Docs) == 0 && !timestamp.Before(end))
		if reachedEnd || cursor.changeStream.ID() == 0 {
			return errNotInStream
		}
	}
	return context.Cause(ctx)
}

// visitInserts calls take for the wanted inserts of a batch. It skips a document that was too large
// for its event and no longer exists.
func (s *Stream) visitInserts(
	ctx context.Context, batch *changes.Batch, want func(*changes.Event) bool, take func(*changes.Event, []byte) bool,
) (more bool, err error) {
	var ev changes.Event
	for _, raw := range batch.Docs {
		if err := changes.Parse(raw, &ev); err != nil {
			return false, err
		}
		if ev.Op != changes.Insert || !want(&ev) {
			continue
		}

		doc := ev.Document
		if !ev.HasDocument {
			if doc, err = s.fetchDocument(ctx, &ev); err != nil {
				return false, err
			}
		}
		if doc != nil && !take(&ev, doc) {
			return false, nil
		}
	}
	return true, nil
}
