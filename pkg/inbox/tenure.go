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

// A process that is killed in a transaction leaves it open on the server, which keeps what it wrote locked for the rest of
// the transaction's lifetime, 60 s by default: whoever gets the partition would meet nothing but conflicts for as long. So
// the sessions of transactions are written down, and who attaches to a partition that another process had and did not give
// back has the server end those of that process.
//
// A tenure is what an Inbox has from its first Attach until it has given everything back by Release. Its document is
// {_id, s, at}: a random id, which the partitions' own documents carry as "by", the ids of the server sessions that
// transactions were seen in, and when it was last written. It goes with the last Release, or by a TTL index.
const (
	tenureKept    = 7 * 24 * time.Hour
	noteAgain     = 24 * time.Hour // a day's silence is far below tenureKept
	noteWithin    = 2 * time.Second
	maxSessions   = 256 // of one tenure; the driver's pool uses few, again and again
	codeNoCommand = 59
)

// tenure is guarded by the mutex of its Inbox.
type tenure struct {
	id     string
	places map[partition]struct{}
	noted  map[string]time.Time // by the session's id
}

// hold makes the place part of the tenure, and begins one if there is none.
func (x *Inbox) hold(p partition) (id string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.tenure == nil {
		x.tenure = &tenure{id: uuid.NewString(), places: make(map[partition]struct{}), noted: make(map[string]time.Time)}
	}
	x.tenure.places[p] = struct{}{}
	return x.tenure.id
}

// letGo is the end of the tenure if that was its last place.
func (x *Inbox) letGo(ctx context.Context, p partition) error {
	x.mu.Lock()
	delete(x.suspects, p) // attached stays: a handler that was left behind may still admit something
	t := x.tenure
	if t == nil {
		x.mu.Unlock()
		return nil
	}
	delete(t.places, p)
	if len(t.places) > 0 {
		x.mu.Unlock()
		return nil
	}
	x.tenure = nil
	x.mu.Unlock()
	if _, err := x.tenures.DeleteOne(mongo.NewSessionContext(ctx, nil), bson.D{{Key: "_id", Value: t.id}}); err != nil {
		return fmt.Errorf("giving the partitions back: %w", err)
	}
	return nil
}

// note writes down the session of the transaction of ctx, once and beside the transaction. That it could not is no reason
// not to handle the message: it only makes others wait longer should this process be killed.
func (x *Inbox) note(ctx context.Context) {
	id, ok := sessionID(ctx)
	if !ok {
		return
	}
	now := time.Now()
	x.mu.Lock()
	t := x.tenure
	if t == nil || now.Sub(t.noted[string(id.Data)]) < noteAgain {
		x.mu.Unlock()
		return
	}
	if len(t.noted) >= maxSessions {
		clear(t.noted)
	}
	t.noted[string(id.Data)] = now // others may use the session meanwhile: it is the same one
	x.mu.Unlock()
	ctx, cancel := context.WithTimeout(mongo.NewSessionContext(ctx, nil), noteWithin)
	defer cancel()
	add := bson.D{
		{Key: "$push", Value: bson.D{{Key: "s", Value: bson.D{{Key: "$each", Value: bson.A{id}}, {Key: "$slice", Value: -maxSessions}}}}},
		{Key: "$currentDate", Value: bson.D{{Key: "at", Value: true}}},
	}
	if _, err := x.tenures.UpdateOne(ctx, bson.D{{Key: "_id", Value: t.id}}, add, options.UpdateOne().SetUpsert(true)); err != nil {
		x.mu.Lock()
		defer x.mu.Unlock()
		delete(t.noted, string(id.Data))
	}
}

// sessionID is the id that the server knows the session of ctx by.
func sessionID(ctx context.Context) (bson.Binary, bool) {
	s := mongo.SessionFromContext(ctx)
	if s == nil {
		return bson.Binary{}, false
	}
	subtype, data, ok := s.ID().Lookup("id").BinaryOK()
	return bson.Binary{Subtype: subtype, Data: data}, ok
}

// evict has the server end the transactions of another tenure. One that was given back left none, and one that is not gone
// after all runs them again: to its process it is a transient error. A server that refuses lets them expire.
//
// It ends only sessions that are in a transaction at this moment. A process that lives uses the others, which the driver's
// pool shares, for reads and writes that nobody would try again.
func (x *Inbox) evict(ctx context.Context, id string) error {
	var t struct {
		Sessions []bson.Binary `bson:"s"`
	}
	err := x.tenures.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&t)
	if errors.Is(err, mongo.ErrNoDocuments) || err == nil && len(t.Sessions) == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading who had the partition: %w", err)
	}
	list, err := x.inTransactions(ctx, t.Sessions)
	if err == nil && len(list) > 0 {
		err = x.client.Database("admin").RunCommand(ctx, bson.D{{Key: "killSessions", Value: list}}).Err()
	}
	if hasCode(err, codeUnauthorized) || hasCode(err, codeNoCommand) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("ending the transactions of who had the partition: %w", err)
	}
	return nil
}

// inTransactions returns those of the sessions that have a transaction open on the server.
func (x *Inbox) inTransactions(ctx context.Context, sessions []bson.Binary) (bson.A, error) {
	cur, err := x.client.Database("admin").Aggregate(ctx, mongo.Pipeline{
		{{Key: "$currentOp", Value: bson.D{{Key: "allUsers", Value: false}, {Key: "idleSessions", Value: true}}}},
		{{Key: "$match", Value: bson.D{
			{Key: "lsid.id", Value: bson.D{{Key: "$in", Value: sessions}}}, {Key: "transaction", Value: bson.D{{Key: "$exists", Value: true}}},
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
