package app

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/dispatch"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// exceptions moves what is dead at once to the dead letters, as the stream showed it, in fenced transactions (N3, N16).
type exceptions struct{ t *term }

// Record implements dispatch.Exceptions.
func (x *exceptions) Record(ctx context.Context, batch []dispatch.Exception) error {
	letters := make([]deadletter.Letter, 0, len(batch))
	for i := range batch {
		l, err := x.letter(ctx, &batch[i])
		if err != nil {
			return err
		}
		letters = append(letters, l)
	}
	moved, err := deadletter.Move(ctx, x.t.held, letters)
	if err != nil {
		return fmt.Errorf("moving to the dead letters: %w", err)
	}
	for i := range letters {
		x.t.log.Warn("an envelope is dead", "collection", letters[i].NS, "class", string(letters[i].Class), "reason", letters[i].Reason, "topic", letters[i].Topic)
	}
	x.t.log.Debug("moved to the dead letters", "new", moved.Moved, "known", moved.Known, "deleted", moved.Deleted)
	return nil
}

func (x *exceptions) letter(ctx context.Context, e *dispatch.Exception) (deadletter.Letter, error) {
	doc := x.t.held.Document()
	l := deadletter.Letter{
		NS: e.NS, Raw: e.Raw, Class: e.Why.Class, Reason: e.Why.Reason, Topic: e.Topic, Partition: record.AnyPartition, Pos: e.Pos,
		Source: deadletter.Source{Kind: "relay", Watcher: x.t.cfg.Watcher, Node: x.t.cfg.Node, Epoch: doc.Epoch, Version: x.t.version},
	}
	if e.Raw != nil {
		return l, nil
	}
	if e.Floor.Token.IsZero() { // swept: the stream may not reach back to it
		if found, err := x.find(ctx, e, &l); found || err != nil {
			return l, err
		}
	}
	err := x.refetch(ctx, e, &l)
	if err != nil && ctx.Err() == nil {
		if found, _ := x.find(ctx, e, &l); found {
			return l, nil
		}
	}
	if errors.Is(err, changestream.ErrNotInStream) {
		return l, x.bare(e, &l)
	}
	return l, err
}

// bare is the letter of an envelope that is nowhere any more: its id is what the refused record tells of it. Without it the
// watermark would wait for an image that cannot come.
func (x *exceptions) bare(e *dispatch.Exception, l *deadletter.Letter) error {
	l.NS = x.t.scope.String()
	for _, o := range x.t.outboxes() {
		if h := routing.NamespaceHash(o.NS()); len(e.NSHash) == 0 || bytes.Equal(h[:], e.NSHash) {
			l.NS = o.NS()
		}
	}
	raw, err := bson.Marshal(bson.D{{Key: "_id", Value: event.ParseID(string(e.ID))}})
	l.Raw = raw
	l.Reason += "; the envelope is gone, only its id is left"
	return err
}

// find reads the envelope from its collection, for a record whose place in the stream is lost.
func (x *exceptions) find(ctx context.Context, e *dispatch.Exception, l *deadletter.Letter) (bool, error) {
	var dbs []string
	if db, _ := x.t.scope.Target(); db != "" {
		dbs = []string{db}
	}
	outboxes, err := store.ListOutboxes(ctx, x.t.mongo.state, x.t.scope.Matches, dbs...)
	if err != nil {
		return false, err
	}
	text := string(e.ID)
	for _, o := range outboxes {
		if h := routing.NamespaceHash(o.NS()); len(e.NSHash) > 0 && !bytes.Equal(h[:], e.NSHash) {
			continue
		}
		for _, id := range []event.ID{event.ParseID(text), event.NewID(text)} {
			kind, val, err := id.MarshalBSONValue()
			if err != nil {
				return false, err
			}
			raw, err := store.Fetch(ctx, x.t.mongo.stream.Database(o.DB).Collection(o.Coll), bson.RawValue{Type: bson.Type(kind), Value: val})
			if errors.Is(err, store.ErrNotFound) {
				continue
			}
			if err == nil {
				l.NS, l.Raw, l.Pos = o.NS(), raw, ""
			}
			return err == nil, err
		}
	}
	return false, nil
}

// refetch reads the image of an envelope again from the stream, behind the watermark: the sink keeps encoded records only,
// and the document may be gone from its collection already.
func (x *exceptions) refetch(ctx context.Context, e *dispatch.Exception, l *deadletter.Letter) error {
	var v event.View
	var id []byte
	match := func(ev *changestream.Event) bool {
		if ev.Op != changestream.Insert || event.Parse(ev.Document, &v) != nil {
			return false
		}
		ns := string(ev.DB) + "." + string(ev.Coll)
		if h := routing.NamespaceHash(ns); len(e.NSHash) > 0 && !bytes.Equal(h[:], e.NSHash) {
			return false
		}
		if id = v.AppendID(id[:0]); !bytes.Equal(id, e.ID) {
			return false
		}
		l.NS, l.Pos = ns, string(ev.Data)
		return true
	}
	raw, err := x.t.stream.Refetch(ctx, e.Floor, match)
	if errors.Is(err, changestream.ErrNotInStream) {
		return fmt.Errorf("the envelope of a refused record is not in the stream behind the watermark: %w", err)
	}
	l.Raw = raw
	return err
}

// withoutDocument is the envelope of an event that was too large for the stream and gone when it was fetched (N24): its id
// is all that is left of it.
func withoutDocument(ev *changestream.Event) []byte {
	raw, err := bson.Marshal(bson.D{{Key: "_id", Value: bson.RawValue{Type: bson.Type(ev.IDType), Value: ev.ID}}})
	if err != nil {
		return nil
	}
	return raw
}
