package waiting

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Reason is why an envelope waits.
type Reason string

// The reasons. The set is closed.
const (
	Retry   Reason = "retry"   // Kafka rejected the record; another attempt follows
	Blocked Reason = "blocked" // an earlier event with the same key waits
	Parked  Reason = "parked"  // the topic or partition cannot be written
	Queued  Reason = "queued"  // it is sent next: a scheduled envelope that is due, a requeue or a replay
)

// Reasons lists all reasons.
func Reasons() []Reason { return []Reason{Retry, Blocked, Parked, Queued} }

// The values of the field `origin`: the ways in which an envelope begins to wait.
const (
	OriginStream    = "stream"
	OriginSweep     = "sweep"
	OriginScheduled = "scheduled"
	OriginRequeue   = "requeue"
	OriginReplay    = "replay"
)

// maxErrorReason bounds a reason in the history of an envelope, in bytes.
const maxErrorReason = 2 << 10

// Entry is an envelope that begins to wait. It is the only way into the store (N16): the stream, a sweep, a scheduled
// envelope that is due, a requeue and a replay all enter here.
type Entry struct {
	Watcher string
	NS      string   // "db.collection" of the outbox
	Raw     bson.Raw // the envelope as the outbox holds it, or as an operator has edited it
	// Delivery is 0 for the first delivery, and greater for a requeue or replay (N18).
	Delivery int32
	Key      string // canonical text of the ordering key
	Slot     int32  // the value of the envelope's field slot; 0 if it is missing or invalid (N28)
	Pos      string // hexadecimal `_data` of its event (N15)
	// Number distinguishes the positions of swept envelopes without a stamp, in the order of their keys. It is not part of
	// the identity, because a repeated write would choose another one.
	Number string

	Pending     []string // topics that do not have it; nil: all that it routes to
	Reason      Reason
	Origin      string
	NextAt      time.Time        // when to send it again, by the server's clock; zero: when its turn comes
	Attempts    int32            // failed attempts
	Uncounted   int32            // of these, as in a Document
	Error       *record.Attempt  // the latest failed attempt
	ReplayOf    string           // the requeue or replay that sends it
	Redelivered bool             // it may have been sent before; its records are flagged
	Sent        []outboxes.Place // of its records so far, if deliveries are recorded on the envelope
	StreamMS    int64            // time of the records with which it may have been sent out of the stream before; 0: it was not
}

// IDSize is the size of the id of a stored document.
const IDSize = 16

// DocumentID returns the id of the stored document. It is a digest, so that ids of any size and type fit, and no
// collation changes their order. Equal ids of outboxes are distinguished by position and delivery. An envelope whose topics do not get it
// for reasons that appear one after the other has a document for each.
func (e *Entry) DocumentID() [IDSize]byte {
	id := e.Raw.Lookup("_id")
	sum := sha256.New()
	field := func(data []byte) {
		var n [8]byte
		binary.LittleEndian.PutUint64(n[:], uint64(len(data)))
		sum.Write(n[:])
		sum.Write(data)
	}

	field([]byte(e.Watcher))
	field([]byte(e.NS))
	field([]byte{byte(id.Type)})
	field(id.Value)
	field([]byte(e.Pos))
	field(binary.LittleEndian.AppendUint32(nil, uint32(e.Delivery)))
	field([]byte(joinTopics(e.Pending)))
	return [IDSize]byte(sum.Sum(nil)[:IDSize])
}

// Document returns the entry as the sender reads it back after it was stored, without its failures.
func (e *Entry) Document() Document {
	document := Document{
		DocumentID: e.DocumentID(), NS: e.NS, ID: e.Raw.Lookup("_id"), Delivery: e.Delivery, Key: e.Key, Pos: e.Pos + e.Number,
		Pending: e.Pending, Reason: e.Reason, Origin: e.Origin, Attempts: e.Attempts, Uncounted: e.Uncounted, Redelivered: e.Redelivered, StreamMS: e.StreamMS,
		ReplayOf: e.ReplayOf, Sent: e.Sent, Envelope: e.Raw, Size: len(e.Raw),
	}
	if !e.NextAt.IsZero() {
		document.NextAt = e.NextAt.UnixMilli()
	}
	return document
}

// SlotOf returns the hash slot of an envelope, or 0 if it has none: slot 0 has these envelopes (N28).
func SlotOf(raw bson.Raw) int32 { return slot.HashSlot(raw) }

// Size returns about how many bytes the entry adds to a transaction.
func (e *Entry) Size() int { return len(e.Raw) + len(e.Key) + 512 }

// newDocument returns the stored form of the entry, with its id.
func (e *Entry) newDocument(documentID [IDSize]byte) (bson.D, error) {
	id, err := e.Raw.LookupErr("_id")
	if err != nil {
		return nil, fmt.Errorf("waiting envelope of %s: it has no _id: %w", e.NS, err)
	}

	fields := bson.D{
		{Key: "_id", Value: bson.Binary{Data: documentID[:]}},
		{Key: "watcher", Value: e.Watcher},
		{Key: "ns", Value: e.NS},
		{Key: "id", Value: id},
		{Key: "delivery", Value: e.Delivery},
		{Key: "slot", Value: e.Slot},
		{Key: "key", Value: e.Key},
		{Key: "pos", Value: e.Pos + e.Number},
		{Key: "topics", Value: joinTopics(e.Pending)},
		{Key: "reason", Value: e.Reason},
		{Key: "origin", Value: e.Origin},
		{Key: "attempts", Value: e.Attempts},
	}
	if !e.NextAt.IsZero() {
		fields = append(fields, bson.E{Key: "nextAt", Value: e.NextAt})
	}
	if e.Error != nil {
		failure := clipReason(e.Error)
		fields = append(fields, bson.E{Key: "error", Value: failure}, bson.E{Key: "history", Value: bson.A{failure}})
	}
	if e.Uncounted > 0 {
		fields = append(fields, bson.E{Key: "uncounted", Value: e.Uncounted})
	}
	if e.ReplayOf != "" {
		fields = append(fields, bson.E{Key: "replayOf", Value: e.ReplayOf})
	}
	if len(e.Sent) > 0 {
		fields = append(fields, bson.E{Key: "sent", Value: e.Sent})
	}
	if e.Redelivered {
		fields = append(fields, bson.E{Key: "redelivered", Value: true})
	}
	if e.StreamMS != 0 {
		fields = append(fields, bson.E{Key: "streamMs", Value: e.StreamMS})
	}
	return append(fields, bson.E{Key: "envelope", Value: e.Raw}), nil
}

// joinTopics returns a list of topics as it is stored: one text, because an index over an array cannot serve a query alone. No
// topic contains a comma. "" stands for all topics that the envelope routes to.
func joinTopics(list []string) string { return strings.Join(slices.Sorted(slices.Values(list)), ",") }

// splitTopics reverts joinTopics.
func splitTopics(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}

// clipReason returns the attempt with a bounded reason.
func clipReason(attempt *record.Attempt) record.Attempt {
	short := *attempt
	short.Reason = record.Clip(attempt.Reason, maxErrorReason)
	return short
}

// Enter stores entries, in the transaction of tx, for at most [mongodb.MaxDocuments] and [mongodb.MaxBytes]. It is idempotent: a document that
// exists stays as it is, because somebody may have changed it since.
func Enter(tx context.Context, coll *mongo.Collection, list []Entry) error {
	if len(list) == 0 {
		return nil
	}
	ids := make([][IDSize]byte, len(list))
	for i := range list {
		ids[i] = list[i].DocumentID()
	}
	// A look and an insert cost the server half as much as an upsert.
	exists, err := findExisting(tx, coll, ids)
	if err != nil {
		return err
	}

	var docs []any
	for i := range list {
		if exists[ids[i]] {
			continue
		}
		exists[ids[i]] = true
		doc, err := list[i].newDocument(ids[i])
		if err != nil {
			return err
		}
		docs = append(docs, doc)
	}
	if len(docs) == 0 {
		return nil
	}

	_, err = coll.InsertMany(tx, docs)
	crash.At("mid-waiting-write")
	return mongodb.DescribeError(err, "storing waiting envelopes", "insert", mongodb.Namespace(coll))
}

// byDocumentID returns the condition for one document of the store.
func byDocumentID(id [IDSize]byte) bson.D {
	return bson.D{{Key: "_id", Value: bson.Binary{Data: id[:]}}}
}

// byDocumentIDs returns the condition for documents of the store.
func byDocumentIDs(ids [][IDSize]byte) bson.D {
	list := make(bson.A, len(ids))
	for i := range ids {
		list[i] = bson.Binary{Data: ids[i][:]}
	}
	return bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: list}}}}
}

// Indexes returns the indexes of the collection `waiting`. The first one is the order of delivery (N15). It alone shows which keys
// wait for which topics, so neither a takeover nor a scan that leaves out parked topics reads the documents. The second one is partial:
// only what is sent at a time is in it.
func Indexes() []mongodb.Index {
	return []mongodb.Index{
		{Name: "order", Keys: mongodb.Ascending("watcher", "ns", "key", "pos", "slot", "topics", "reason", "origin", "id", "delivery")},
		{
			Name: "watcher_1_nextAt_1_slot_1", Keys: mongodb.Ascending("watcher", "nextAt", "slot"),
			Partial: bson.D{{Key: "nextAt", Value: bson.D{{Key: "$exists", Value: true}}}},
		},
		{Name: "id_1_ns_1", Keys: mongodb.Ascending("id", "ns")},
		{
			Name: "replayOf_1", Keys: mongodb.Ascending("replayOf"),
			Partial: bson.D{{Key: "replayOf", Value: bson.D{{Key: "$exists", Value: true}}}},
		},
	}
}
