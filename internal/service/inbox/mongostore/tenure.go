package mongostore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/service/inbox"
)

// If a process is killed in a transaction, the transaction stays open on the server, and its writes
// stay locked until the lifetime of the transaction is over (default 60 s). During this time, the
// next owner of the partition would have nothing but conflicts. So a Store stores the ids of its
// sessions, and a sign of life. If a process attaches to a partition that another process has not
// given back, and that process gives no sign of life, the server ends the transactions of that process.
//
// A tenure lasts from the first Attach of an inbox until Release has given all partitions back. Its
// document is {_id, s, at}: a random id, which the documents of its partitions contain as "by", the
// ids of the server sessions of its transactions, and the time of the last sign of life. It is deleted
// by the last Release, or by a TTL index. A partition that is given back has no "by".
//
// Nothing but the transactions of the consumer may use the sessions: see transaction.Pool.
const (
	tenureRetention       = 7 * 24 * time.Hour
	sessionRecordInterval = 24 * time.Hour // a session is stored again after this time; far below tenureRetention
	sessionRecordTimeout  = 2 * time.Second
	maxSessions           = 256 // per tenure; the pool of a consumer reuses a few sessions
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
func (s *Store) AddPartition(partition inbox.Partition) (id string) {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.tenure == nil {
		s.tenure = &tenure{
			id:               uuid.NewString(),
			partitions:       make(map[inbox.Partition]struct{}),
			recordedSessions: make(map[string]time.Time),
		}
	}
	s.tenure.partitions[partition] = struct{}{}
	return s.tenure.id
}

// RemovePartitions removes partitions from the tenure, and removes the tenure from their documents, so
// that their next owner ends no transaction. If they were the last ones, the tenure ends.
func (s *Store) RemovePartitions(ctx context.Context, list []inbox.Partition) error {
	ctx = mongo.NewSessionContext(ctx, nil)
	s.mu.Lock()
	tenure := s.tenure
	if tenure == nil {
		s.mu.Unlock()
		return nil
	}

	ids := make(bson.A, len(list))
	for i, p := range list {
		ids[i] = markID(inbox.LaneKey{Partition: p, Lane: inbox.PartitionLane})
		delete(tenure.partitions, p)
	}
	isLast := len(tenure.partitions) == 0
	if isLast {
		s.tenure = nil
	}
	s.mu.Unlock()

	// Another owner may have attached in the meantime. Its mark stays.
	_, err := s.offsets.UpdateMany(ctx,
		bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}, {Key: "by", Value: tenure.id}},
		bson.D{{Key: "$unset", Value: bson.D{{Key: "by", Value: ""}}}})
	if isLast {
		_, deleteErr := s.tenures.DeleteOne(ctx, bson.D{{Key: "_id", Value: tenure.id}})
		err = errors.Join(err, deleteErr)
	}
	if err != nil {
		return fmt.Errorf("giving the partitions back: %w", err)
	}
	return nil
}

// Heartbeat stores a sign of life of the tenure, and ends the transactions of previous owners that have
// become silent since EndTransactions.
func (s *Store) Heartbeat(ctx context.Context) error {
	ctx = mongo.NewSessionContext(ctx, nil)
	s.mu.Lock()
	tenure := s.tenure
	previous := slices.Collect(maps.Keys(s.previous))
	s.mu.Unlock()

	var errs []error
	if tenure != nil {
		// RecordTransaction creates the document. A tenure without a transaction needs none. The driver would repeat an update of one
		// document without a pause until the next sign of life is due.
		_, err := s.tenures.UpdateMany(ctx, bson.D{{Key: "_id", Value: tenure.id}},
			bson.D{{Key: "$currentDate", Value: bson.D{{Key: "at", Value: true}}}})
		if err != nil {
			errs = append(errs, fmt.Errorf("storing a sign of life: %w", err))
		}
	}
	for _, id := range previous {
		errs = append(errs, s.EndTransactions(ctx, id))
	}
	return errors.Join(errs...)
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
		{Key: "$expr", Value: bson.D{{Key: "$gt", Value: bson.A{"$at", mongodb.AfterNow(-sessionRecordInterval - time.Hour)}}}},
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
	tenure := s.tenure
	if tenure == nil || now.Sub(tenure.recordedSessions[string(id.Data)]) < sessionRecordInterval {
		s.mu.Unlock()
		return
	}
	// A forgotten session is recorded again by its next transaction.
	if len(tenure.recordedSessions) >= maxSessions {
		clear(tenure.recordedSessions)
	}

	// Other transactions may use the session from now on: it is the same session.
	tenure.recordedSessions[string(id.Data)] = now
	s.mu.Unlock()

	ctx, cancel := context.WithTimeout(mongo.NewSessionContext(ctx, nil), sessionRecordTimeout)
	defer cancel()

	push := bson.D{{Key: "$each", Value: bson.A{id}}, {Key: "$slice", Value: -maxSessions}}
	update := bson.D{
		{Key: "$push", Value: bson.D{{Key: "s", Value: push}}},
		{Key: "$currentDate", Value: bson.D{{Key: "at", Value: true}}},
	}
	_, err := s.tenures.UpdateOne(ctx, bson.D{{Key: "_id", Value: tenure.id}}, update, options.UpdateOne().SetUpsert(true))
	if err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		// The next transaction tries to record the session again.
		delete(tenure.recordedSessions, string(id.Data))
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

// EndTransactions makes the server end the transactions of another tenure if its process has given no
// sign of life for inbox.MaxSilence. Otherwise the transactions continue, and Heartbeat calls
// EndTransactions again until the tenure is silent or over. A tenure that was given back has no
// document. If its process is alive after all, each ended transaction is rolled back there as a whole.
// If the server does not allow this, the transactions expire.
//
// Only sessions that are in a transaction at this moment are ended.
func (s *Store) EndTransactions(ctx context.Context, id string) error {
	tenure, err := s.readTenure(ctx, id)
	if err != nil {
		return err
	}

	s.mu.Lock()
	delete(s.previous, id)
	if tenure != nil && !tenure.Silent {
		s.previous[id] = struct{}{}
	}
	s.mu.Unlock()
	if tenure == nil || !tenure.Silent {
		return nil
	}

	// Killing idle sessions would interrupt reads that another process runs with them.
	list, err := s.sessionsInTransaction(ctx, tenure.Sessions)
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

// storedTenure is another tenure, as its document describes it.
type storedTenure struct {
	Sessions []bson.Binary `bson:"s"`
	Silent   bool          `bson:"silent"`
}

// readTenure returns a tenure, or nil if it is over.
func (s *Store) readTenure(ctx context.Context, id string) (*storedTenure, error) {
	isSilent := bson.D{{Key: "$lte", Value: bson.A{"$at", mongodb.AfterNow(-inbox.MaxSilence)}}}
	cur, err := cursor.Aggregate(ctx, s.tenures, mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "_id", Value: id}}}},
		{{Key: "$project", Value: bson.D{{Key: "s", Value: 1}, {Key: "silent", Value: isSilent}}}},
	})
	list, err := cursor.All[storedTenure](ctx, "reading the tenure of the previous owner of the partition", cur, err)
	if err != nil || len(list) == 0 {
		return nil, err
	}
	return &list[0], nil
}

// sessionsInTransaction returns the sessions that have an open transaction on the server.
func (s *Store) sessionsInTransaction(ctx context.Context, sessions []bson.Binary) ([]bson.Raw, error) {
	// A transaction between two statements is idle, and still open.
	cur, err := cursor.Aggregate(ctx, s.client.Database("admin"), mongo.Pipeline{
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
