package pipeline

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// feed turns inserts into items and delivers them to the dispatcher. A single goroutine uses it. All that an insert needs is
// reused, so an insert costs no allocation.
type feed struct {
	recordBuilder

	BuildConfig
	FeedConfig

	// State of the current insert, and buffers reused for the next one.
	ev         changes.Event
	item       Item
	nsBuf      []byte
	readAt     time.Time // when the current envelope was read, or the batch of events with it
	eventCount int
	rereading  bool   // an earlier owner may have delivered the inserts
	stampPos   []byte // the position of the current insert in a sweep
	isSweep    bool   // the inserts come from the outbox, which does not have the times of their records
}

// FeedConfig contains the parts and settings that the inserts of the stream and of sweeps share. All fields are required.
type FeedConfig struct {
	Dispatcher *Dispatcher
	Notes      Notes

	DropExpired      bool   // drop expired envelopes instead of dead-lettering them
	RecordDeliveries bool   // record every delivery on its envelope
	StampMargin      uint32 // seconds by which a server timestamp may precede the commit
}

// Notes records facts about inserts for the term.
type Notes interface {
	// NoteIrregularID returns once the registry has recorded that the ids of the collection with this UUID
	// must not be used as times.
	NoteIrregularID(ctx context.Context, uuid [16]byte) error
	// NoteScheduled notes a scheduled envelope. It returns once a later owner will look for scheduled envelopes in the collection.
	NoteScheduled(ctx context.Context, ns string, dueAt time.Time) error
	// CountDropped is called for each envelope that is discarded, with the class of the reason.
	CountDropped(class record.Class)
}

func newFeed(build BuildConfig, cfg FeedConfig) feed {
	return feed{recordBuilder: build.newBuilder(), BuildConfig: build, FeedConfig: cfg}
}

// stored has the topics of an envelope that was stored before.
type stored struct {
	found  bool     // it waits, is dead, or was sent since it waited
	topics []string // for which it waits or is dead; "" is for all
}

// isWhole reports whether no topic of the envelope is left to the stream.
func (s stored) isWhole() bool { return s.found && slices.Contains(s.topics, "") }

// deliverInsert delivers the insert in f.ev, which comes from the stream or from a sweep. stored has its topics that were stored
// before. It blocks while the dispatcher has no room.
func (f *feed) deliverInsert(ctx context.Context, commitMS int64, stored stored) error {
	// The stream and a sweep repeat envelopes of the previous owner. If it stored all topics, the reconciler decides.
	if stored.isWhole() {
		return nil
	}

	item := &f.item
	*item = Item{
		CommitMS: commitMS,
		Raw:      f.ev.Document,
		DB:       f.ev.DB,
		Coll:     f.ev.Coll,
		Pos:      f.ev.Pos,
		Records:  item.Records[:0],
	}
	if err := f.fillItem(item, stored); err != nil {
		return f.rejectEnvelope(ctx, item, err)
	}

	// Topics for which the previous owner dead-lettered the envelope, or left it waiting, are settled. It may have died
	// before it sent the others, so those are delivered here (N15).
	if stored.found {
		item.Records = dropTopics(item.Records, stored.topics)
		if len(item.Records) == 0 {
			return nil
		}
		return f.Dispatcher.Deliver(ctx, item)
	}

	if f.view.HasDueAt {
		return f.Notes.NoteScheduled(ctx, f.namespace(), time.UnixMilli(f.view.DueAt))
	}

	if err := f.checkIDTime(ctx); err != nil {
		return err
	}
	f.requestRecording(item)
	item.Follow = f.follow(f.readAt, &f.view, item.Records, f.ev.DB, f.ev.Coll, item.CommitMS)
	return f.Dispatcher.Deliver(ctx, item)
}

// fillItem parses the envelope in f.ev and appends one record per target to item. The records share
// key, value and headers. An envelope that the reconciler owns gets none. The error is a
// *record.Rejection.
func (f *feed) fillItem(item *Item, stored stored) error {
	if !f.ev.HasDocument {
		item.Raw = envelopeWithIDOnly(&f.ev)
		return &record.Rejection{Class: record.Malformed, Reason: string(f.ev.Note)}
	}

	if err := f.mapping.Parse(f.ev.Document, &f.view); err != nil {
		// The claim takes every envelope with a due time, and decides about it. Otherwise it would get two letters.
		due, scheduled := bson.Raw(f.ev.Document).Lookup("dueAt").DateTimeOK()
		if !scheduled {
			return err
		}
		f.view = envelope.View{DueAt: due, HasDueAt: true}
	}
	item.Key = f.view.OrderingKey()
	// A scheduled envelope is sent when it is due.
	if f.view.HasDueAt {
		return nil
	}
	// Few envelopes expire, and the clock is a system call. The previous owner began all targets of an envelope in time if it stored
	// one of them. In the reread, it may have sent the envelope in time. Only its records show that.
	var expired error
	if f.view.HasExpiresAt && !stored.found {
		expired = f.checkExpiry(f.Now())
	}
	if expired != nil && !f.Dispatcher.IsRereading() {
		return expired
	}

	f.meta.DB = f.ev.DB
	f.meta.Coll = f.ev.Coll
	f.meta.ClusterTime = f.ev.ClusterTime
	f.meta.CommitMS = f.ev.WallMS

	var err error
	item.Records, _, err = f.buildRecords(item.Records, nil)
	if f.rereading {
		f.addPositions(item)
	}

	// If the previous owner sent a record of the envelope in time, the envelope has not expired. That owner began all targets together, so
	// the remaining targets get their records as well. While that is unknown, the envelope waits for the next read-back: the previous owner
	// may also have found that it has expired, and sent later events of its key.
	if err == nil && expired != nil && !slices.ContainsFunc(item.Records, f.isInTopic) {
		if !slices.ContainsFunc(item.Records, f.mayBeInTopic) {
			item.Records = item.Records[:0]
			return expired
		}
		item.Hold = true
	}
	return err
}

// addPositions adds the positions with which the envelope may have been sent out of the store: an earlier owner may have stored it when
// it came from the stream or from a sweep, and sent it before the resolved position passed its event.
func (f *feed) addPositions(item *Item) {
	f.stampPos = outboxes.AppendPosAt(f.stampPos[:0], f.view.TS)
	for i := range item.Records {
		item.Records[i].Sent = record.Sent{Positions: [2][]byte{item.Pos, f.stampPos}, AnyTime: f.isSweep}
	}
}

// isInTopic reports whether the read-back has found the record in its topic.
func (f *feed) isInTopic(record record.Record) bool {
	_, _, ok := f.Dispatcher.sink.FindHit(&record)
	return ok
}

// mayBeInTopic reports whether an earlier owner may have sent the record.
func (f *feed) mayBeInTopic(record record.Record) bool { return f.Dispatcher.sink.MayHold(&record) }

// requestRecording requests that the delivery of item is recorded on its envelope, if the configuration
// requires it.
func (f *feed) requestRecording(item *Item) {
	if !f.RecordDeliveries {
		return
	}

	id := f.documentID()
	// The delivery is recorded after the batch is released, so its fields must not alias the batch.
	item.Sent = &Delivery{Outcome: ledger.Outcome{
		NS:         f.namespace(),
		EnvelopeID: bson.RawValue{Type: id.Type, Value: slices.Clone(id.Value)},
		Stamp:      f.stampOfInsert(f.view.TS),
	}}
}

// stampOfInsert returns the stamp of the envelope, or zero if it is far older than the commit: then it was copied here with the
// document, and is unrelated to this insert.
func (f *feed) stampOfInsert(stamp bson.Timestamp) bson.Timestamp {
	if f.ev.ClusterTime.T > stamp.T+f.StampMargin {
		return bson.Timestamp{}
	}
	return stamp
}

// checkIDTime compares the time in the id of an envelope without a stamp with the commit of its event.
// If they differ by more than the margin, it returns once the registry has recorded that the ids of the
// collection are irregular (N25). That must happen before the resolved position passes the event. A swept
// envelope has no commit time to compare with.
func (f *feed) checkIDTime(ctx context.Context) error {
	if !f.view.TS.IsZero() || f.ev.ClusterTime.IsZero() || !f.ev.HasUUID {
		return nil
	}

	at, ok := outboxes.IDTime(f.ev.IDType, f.ev.ID)
	if !ok || time.Unix(int64(f.ev.ClusterTime.T), 0).Sub(at).Abs() <= outboxes.ClockMargin {
		return nil
	}
	return f.Notes.NoteIrregularID(ctx, f.ev.UUID)
}

// documentID returns the _id of the envelope in f.ev. It aliases the batch.
func (f *feed) documentID() bson.RawValue {
	return bson.Raw(f.ev.Document).Lookup("_id")
}

// namespace returns "database.collection" of f.ev.
func (f *feed) namespace() string {
	f.nsBuf = append(f.nsBuf[:0], f.ev.DB...)
	f.nsBuf = append(f.nsBuf, '.')
	f.nsBuf = append(f.nsBuf, f.ev.Coll...)
	return string(f.nsBuf)
}

// rejectEnvelope dead-letters the envelope of item if err is a *record.Rejection, and returns any
// other err. An expired envelope is dropped instead if it is configured so.
func (f *feed) rejectEnvelope(ctx context.Context, item *Item, err error) error {
	rejection, ok := errors.AsType[*record.Rejection](err)
	if !ok {
		return err
	}

	if rejection.Class.IsDiscarded(f.DropExpired) {
		f.Notes.CountDropped(rejection.Class)
		return nil
	}

	item.Dead = rejection
	item.Records = item.Records[:0]
	if f.RecordDeliveries && f.ev.HasDocument {
		item.Whole, item.Stamp = true, f.stampOfInsert(outboxes.Stamp(f.ev.Document))
	}
	return f.Dispatcher.Deliver(ctx, item)
}

// envelopeWithIDOnly returns an envelope that contains only the id of ev. It is for an event that
// was too large for the stream, and whose document was gone when it was fetched (N24).
func envelopeWithIDOnly(ev *changes.Event) []byte {
	raw, err := bson.Marshal(bson.D{{Key: "_id", Value: bson.RawValue{Type: bson.Type(ev.IDType), Value: ev.ID}}})
	if err != nil {
		return nil
	}
	return raw
}
