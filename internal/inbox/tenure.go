package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// If a process is killed in a transaction, the transaction stays open on the server, and its writes
// stay locked until the lifetime of the transaction is over (default 60 s). During this time, the
// next owner of the partition would have nothing but conflicts. So an Inbox stores the ids of its
// sessions. If a process attaches to a partition that another process has not given back, the
// server ends the transactions of that process.
//
// A tenure lasts from the first Attach of an Inbox until Release has given all partitions back. Its
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

// tenure is protected by the mutex of its Inbox.
type tenure struct {
	id               string
	partitions       map[partition]struct{}
	recordedSessions map[string]time.Time // time of the last record by session id
}

// addToTenure adds the partition to the tenure and returns the id of the tenure. It begins a tenure
// if there is none.
func (x *Inbox) addToTenure(p partition) (id string) {
	x.mu.Lock()
	defer x.mu.Unlock()

	if x.tenure == nil {
		x.tenure = &tenure{
			id:               uuid.NewString(),
			partitions:       make(map[partition]struct{}),
			recordedSessions: make(map[string]time.Time),
		}
	}
	x.tenure.partitions[p] = struct{}{}
	return x.tenure.id
}

// removeFromTenure removes the partition from the tenure. If it was the last one, the tenure ends.
func (x *Inbox) removeFromTenure(ctx context.Context, p partition) error {
	x.mu.Lock()
	// attached is kept: a handler that is still running may admit a message.
	delete(x.suspicions, p)

	t := x.tenure
	if t == nil {
		x.mu.Unlock()
		return nil
	}

	delete(t.partitions, p)
	if len(t.partitions) > 0 {
		x.mu.Unlock()
		return nil
	}

	x.tenure = nil
	x.mu.Unlock()

	filter := bson.D{{Key: "_id", Value: t.id}}
	if _, err := x.tenures.DeleteOne(mongo.NewSessionContext(ctx, nil), filter); err != nil {
		return fmt.Errorf("giving the partitions back: %w", err)
	}

	return nil
}

// recordSession stores the session of the transaction of ctx, once and outside of the transaction.
// A failure is ignored: it does not prevent the handling of the message. It only makes the next
// owner wait longer if this process is killed.
func (x *Inbox) recordSession(ctx context.Context) {
	id, ok := sessionID(ctx)
	if !ok {
		return
	}

	now := time.Now()
	x.mu.Lock()
	t := x.tenure
	if t == nil || now.Sub(t.recordedSessions[string(id.Data)]) < sessionRecordInterval {
		x.mu.Unlock()
		return
	}
	if len(t.recordedSessions) >= maxSessions {
		clear(t.recordedSessions)
	}

	// Other transactions may use the session from now on: it is the same session.
	t.recordedSessions[string(id.Data)] = now
	x.mu.Unlock()

	ctx, cancel := context.WithTimeout(mongo.NewSessionContext(ctx, nil), sessionRecordTimeout)
	defer cancel()

	push := bson.D{{Key: "$each", Value: bson.A{id}}, {Key: "$slice", Value: -maxSessions}}
	update := bson.D{
		{Key: "$push", Value: bson.D{{Key: "s", Value: push}}},
		{Key: "$currentDate", Value: bson.D{{Key: "at", Value: true}}},
	}
	_, err := x.tenures.UpdateOne(ctx, bson.D{{Key: "_id", Value: t.id}}, update, options.UpdateOne().SetUpsert(true))
	if err != nil {
		x.mu.Lock()
		defer x.mu.Unlock()
		delete(t.recordedSessions, string(id.Data))
	}
}

// sessionID returns the id of the session of ctx on the server.
func sessionID(ctx context.Context) (bson.Binary, bool) {
	s := mongo.SessionFromContext(ctx)
	if s == nil {
		return bson.Binary{}, false
	}

	subtype, data, ok := s.ID().Lookup("id").BinaryOK()
	return bson.Binary{Subtype: subtype, Data: data}, ok
}

// endTransactionsOf makes the server end the transactions of another tenure. A tenure that was
// given back has none. If its process is alive after all, the ended transactions are transient
// errors there and run again. If the server does not allow this, the transactions expire.
//
// Only sessions that are in a transaction at this moment are ended. A live process uses the other
// sessions for reads and writes that are not retried.
func (x *Inbox) endTransactionsOf(ctx context.Context, id string) error {
	var t struct {
		Sessions []bson.Binary `bson:"s"`
	}
	err := x.tenures.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&t)
	if errors.Is(err, mongo.ErrNoDocuments) || err == nil && len(t.Sessions) == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the tenure of the previous owner of the partition: %w", err)
	}

	list, err := x.sessionsInTransaction(ctx, t.Sessions)
	if err == nil && len(list) > 0 {
		err = x.client.Database("admin").RunCommand(ctx, bson.D{{Key: "killSessions", Value: list}}).Err()
	}
	if hasCode(err, codeUnauthorized) || hasCode(err, codeNoCommand) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("ending the transactions of the previous owner of the partition: %w", err)
	}

	return nil
}

// sessionsInTransaction returns the sessions that have an open transaction on the server.
func (x *Inbox) sessionsInTransaction(ctx context.Context, sessions []bson.Binary) (bson.A, error) {
	cur, err := x.client.Database("admin").Aggregate(ctx, mongo.Pipeline{
		{{Key: "$currentOp", Value: bson.D{{Key: "allUsers", Value: false}, {Key: "idleSessions", Value: true}}}},
		{{Key: "$match", Value: bson.D{
			{Key: "lsid.id", Value: bson.D{{Key: "$in", Value: sessions}}},
			{Key: "transaction", Value: bson.D{{Key: "$exists", Value: true}}},
		}}},
		{{Key: "$group", Value: bson.D{{Key: "_id", Value: "$lsid.id"}}}},
	})
	if err != nil {
		return nil, err
	}

	var docs []struct {
		ID bson.Binary `bson:"_id"`
	}
	if err := cur.All(ctx, &docs); err != nil {
		return nil, err
	}

	list := make(bson.A, len(docs))
	for i, d := range docs {
		list[i] = bson.D{{Key: "id", Value: d.ID}}
	}

	return list, nil
}
