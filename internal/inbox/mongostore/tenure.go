package mongostore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/cursor"
	"github.com/outrelay/outrelay/internal/inbox"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// If a process is killed in a transaction, the transaction stays open on the server, and its writes
// stay locked until the lifetime of the transaction is over (default 60 s). During this time, the
// next owner of the partition would have nothing but conflicts. So a Store stores the ids of its
// sessions. If a process attaches to a partition that another process has not given back, the
// server ends the transactions of that process.
//
// A tenure lasts from the first Attach of an inbox until Release has given all partitions back. Its
// document is {_id, s, at}: a random id, which the documents of its partitions contain as "by", the
// ids of the server sessions of its transactions, and the time of the last write. It is deleted by
// the last Release, or by a TTL index.
const (
	tenureRetention       = 7 * 24 * time.Hour
	sessionRecordInterval = 24 * time.Hour // a session is stored again after this time; far below tenureRetention
	sessionRecordTimeout  = 2 * time.Second
	maxSessions           = 256 // per tenure; the pool of the driver reuses a few sessions
	codeNoCommand         = 59
)

// tenure is protected by the mutex of its Store.
type tenure struct {
	id               string
	partitions       map[inbox.Partition]struct{}
	recordedSessions map[string]time.Time // time of the last record by session id
}

// AddPartition adds the partition to the tenure and returns the id of the tenure. It begins a tenure
// if there is none.
func (s *Store) AddPartition(p inbox.Partition) (id string) {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.tenure == nil {
		s.tenure = &tenure{
			id:               uuid.NewString(),
			partitions:       make(map[inbox.Partition]struct{}),
			recordedSessions: make(map[string]time.Time),
		}
	}
	s.tenure.partitions[p] = struct{}{}
	return s.tenure.id
}

// RemovePartition removes the partition from the tenure. If it was the last one, the tenure ends.
func (s *Store) RemovePartition(ctx context.Context, p inbox.Partition) error {
	s.mu.Lock()
	t := s.tenure
	if t == nil {
		s.mu.Unlock()
		return nil
	}

	delete(t.partitions, p)
	// Other partitions still need the sessions of the tenure.
	if len(t.partitions) > 0 {
		s.mu.Unlock()
		return nil
	}

	s.tenure = nil
	s.mu.Unlock()

	filter := bson.D{{Key: "_id", Value: t.id}}
	if _, err := s.tenures.DeleteOne(mongo.NewSessionContext(ctx, nil), filter); err != nil {
		return fmt.Errorf("giving the partitions back: %w", err)
	}

	return nil
}

// IsHeld reports whether a process that recorded a transaction within the last day has attached one of the consumer's
// partitions, and has not given it back.
func (s *Store) IsHeld(ctx context.Context, consumer string) (bool, error) {
	docs, err := s.findMarks(ctx, bson.D{
		{Key: "_id.c", Value: consumer}, {Key: "_id.l", Value: inbox.PartitionLane}, {Key: "by", Value: bson.D{{Key: "$type", Value: "string"}}},
	})
	if err != nil || len(docs) == 0 {
		return false, err
	}

	owners := make(bson.A, len(docs))
	for i, d := range docs {
		owners[i] = d.Mark.By
	}
	// A live owner has recorded a transaction within this time.
	n, err := s.tenures.CountDocuments(ctx, bson.D{
		{Key: "_id", Value: bson.D{{Key: "$in", Value: owners}}},
		{Key: "$expr", Value: bson.D{{Key: "$gt", Value: bson.A{"$at", afterNow(-sessionRecordInterval - time.Hour)}}}},
	})
	if err != nil {
		return false, fmt.Errorf("looking for the owners of the partitions of %s: %w", consumer, err)
	}
	return n > 0, nil
}

// RecordTransaction stores the session of the transaction of ctx, once and outside of the transaction.
// A failure is ignored: it does not prevent the handling of the message. It only makes the next
// owner wait longer if this process is killed.
func (s *Store) RecordTransaction(ctx context.Context) {
	id, ok := sessionID(ctx)
	if !ok {
		return
	}

	now := time.Now()
	s.mu.Lock()
	t := s.tenure
	if t == nil || now.Sub(t.recordedSessions[string(id.Data)]) < sessionRecordInterval {
		s.mu.Unlock()
		return
	}
	// A forgotten session is recorded again by its next transaction.
	if len(t.recordedSessions) >= maxSessions {
		clear(t.recordedSessions)
	}

	// Other transactions may use the session from now on: it is the same session.
	t.recordedSessions[string(id.Data)] = now
	s.mu.Unlock()

	ctx, cancel := context.WithTimeout(mongo.NewSessionContext(ctx, nil), sessionRecordTimeout)
	defer cancel()

	push := bson.D{{Key: "$each", Value: bson.A{id}}, {Key: "$slice", Value: -maxSessions}}
	update := bson.D{
		{Key: "$push", Value: bson.D{{Key: "s", Value: push}}},
		{Key: "$currentDate", Value: bson.D{{Key: "at", Value: true}}},
	}
	_, err := s.tenures.UpdateOne(ctx, bson.D{{Key: "_id", Value: t.id}}, update, options.UpdateOne().SetUpsert(true))
	if err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		// The next transaction tries to record the session again.
		delete(t.recordedSessions, string(id.Data))
	}
}

// sessionID returns the id of the session of ctx on the server.
func sessionID(ctx context.Context) (bson.Binary, bool) {
	sess := mongo.SessionFromContext(ctx)
	if sess == nil {
		return bson.Binary{}, false
	}

	subtype, data, ok := sess.ID().Lookup("id").BinaryOK()
	return bson.Binary{Subtype: subtype, Data: data}, ok
}

// EndTransactions makes the server end the transactions of another tenure. A tenure that was
// given back has none. If its process is alive after all, the ended transactions are transient
// errors there and run again. If the server does not allow this, the transactions expire.
//
// Only sessions that are in a transaction at this moment are ended. A live process uses the other
// sessions for reads and writes that are not retried.
func (s *Store) EndTransactions(ctx context.Context, id string) error {
	var t struct {
		Sessions []bson.Binary `bson:"s"`
	}
	err := s.tenures.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&t)
	if errors.Is(err, mongo.ErrNoDocuments) || err == nil && len(t.Sessions) == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the tenure of the previous owner of the partition: %w", err)
	}

	// Killing idle sessions would interrupt reads that another process runs with them.
	list, err := s.sessionsInTransaction(ctx, t.Sessions)
	if err == nil {
		err = mongodb.KillSessions(ctx, s.client, list)
	}
	// Without the privilege, the next owner waits until the server ends the transactions.
	if mongodb.HasCode(err, codeUnauthorized, codeNoCommand) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("ending the transactions of the previous owner of the partition: %w", err)
	}

	return nil
}

// sessionsInTransaction returns the sessions that have an open transaction on the server.
func (s *Store) sessionsInTransaction(ctx context.Context, sessions []bson.Binary) ([]bson.Raw, error) {
	// A transaction between two statements is idle, and still open.
	cur, err := s.client.Database("admin").Aggregate(ctx, mongo.Pipeline{
		{{Key: "$currentOp", Value: bson.D{{Key: "allUsers", Value: false}, {Key: "idleSessions", Value: true}}}},
		{{Key: "$match", Value: bson.D{
			{Key: "lsid.id", Value: bson.D{{Key: "$in", Value: sessions}}},
			{Key: "transaction", Value: bson.D{{Key: "$exists", Value: true}}},
		}}},
		{{Key: "$group", Value: bson.D{{Key: "_id", Value: "$lsid.id"}}}},
		{{Key: "$project", Value: bson.D{{Key: "_id", Value: 0}, {Key: "id", Value: "$_id"}}}},
	})
	return cursor.All[bson.Raw](ctx, "reading open transactions", cur, err)
}
