package setaside

import (
	"context"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

const (
	// memberExpiry is how long the record of a member that was killed is valid.
	memberExpiry = 30 * time.Second
	// memberRenewal is the age at which a Census renews a record that has not changed. Two more may fail before the record expires.
	memberRenewal = 15 * time.Second
)

// Member describes a member of a group that takes a Census.
type Member struct {
	Group, ID string
	Handlers  []string // the names of its handlers
	Stops     []Stop   // its handlers that are suspended or paused
}

// Stop describes a handler of a member that takes no messages.
type Stop struct {
	Handler string    `bson:"h"`           // its name; "" for the whole consumer, by Consumer.Pause
	Until   time.Time `bson:"u,omitempty"` // of the next attempt; zero if a program has paused the handler
	Reason  string    `bson:"r,omitempty"` // the last failure
}

// Members are the records of the members of a group, by their ids.
type Members map[string]MemberRecord

// MemberRecord is the last record of a member.
type MemberRecord struct {
	At       time.Time `bson:"at"`
	Handlers []string  `bson:"handlers"`
	Stops    []Stop    `bson:"stops"`
}

func (r *MemberRecord) isFresh(now time.Time) bool { return now.Sub(r.At) <= memberExpiry }

// NeedRecord reports whether the record of a member has changed or is old.
func (m Members) NeedRecord(member Member, now time.Time) bool {
	last, recorded := m[member.ID]
	isSame := func(a, b Stop) bool {
		// BSON has milliseconds.
		return a.Handler == b.Handler && a.Reason == b.Reason && a.Until.UnixMilli() == b.Until.UnixMilli()
	}
	return !recorded || now.Sub(last.At) >= memberRenewal ||
		!slices.Equal(last.Handlers, member.Handlers) || !slices.EqualFunc(last.Stops, member.Stops, isSame)
}

// ListHandlers returns the names of the handlers of all members that run, in order.
func (m Members) ListHandlers(now time.Time) (names []string) {
	for _, record := range m {
		if record.isFresh(now) {
			names = append(names, record.Handlers...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// recordMember stores the record of a member, and returns the document of the group with it.
func (s *Collection) recordMember(ctx context.Context, member Member) (*storedCensus, error) {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()

	change := mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "members." + member.ID, Value: bson.D{
		{Key: "at", Value: "$$NOW"},
		{Key: "handlers", Value: mongodb.Literal(member.Handlers)},
		{Key: "stops", Value: mongodb.Literal(member.Stops)},
	}}}}}}
	doc := new(storedCensus)
	opts := options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)
	if err := s.counts.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: member.Group}}, change, opts).Decode(doc); err != nil {
		return nil, fmt.Errorf("recording a member of group %s: %w", member.Group, err)
	}
	doc.Now = doc.Members[member.ID].At
	return doc, nil
}

// Leave removes the record of a member: see Store.
func (s *Collection) Leave(ctx context.Context, group, member string) error {
	change := bson.D{{Key: "$unset", Value: bson.D{{Key: "members." + member, Value: ""}}}}
	if _, err := s.counts.UpdateOne(ctx, bson.D{{Key: "_id", Value: group}}, change); err != nil {
		return fmt.Errorf("removing the record of a member of group %s: %w", group, err)
	}
	return nil
}

// freshMembers returns the field members without the records of members that were killed, for an update by pipeline.
func freshMembers() bson.D {
	isFresh := bson.D{{Key: "$gte", Value: bson.A{"$$this.v.at", mongodb.AfterNow(-memberExpiry)}}}
	all := bson.D{{Key: "$objectToArray", Value: mongodb.IfNull("$members", bson.D{})}}
	return bson.D{{Key: "$arrayToObject", Value: bson.D{
		{Key: "$filter", Value: bson.D{{Key: "input", Value: all}, {Key: "cond", Value: isFresh}}},
	}}}
}

// GroupNote describes a consumer group of a database, by the records of its members.
type GroupNote struct {
	Group  string
	At     time.Time // when a member counted the messages last; a member that runs does so every CensusInterval
	Now    time.Time // by the server's clock
	Counts []Count
	Stops  []Stop // one for each member that has stopped a handler
}

// Groups returns what the members of all groups of the database have recorded, by the name of the group, or for the named group alone.
func (d *Desk) Groups(ctx context.Context, only string) ([]GroupNote, error) {
	match := bson.D{}
	if only != "" {
		match = bson.D{{Key: "_id", Value: only}}
	}
	cur, err := cursor.Aggregate(ctx, d.counts, mongo.Pipeline{
		{{Key: "$match", Value: match}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
		{{Key: "$set", Value: bson.D{{Key: "now", Value: "$$NOW"}}}},
	})
	docs, err := cursor.All[storedCensus](ctx, "reading the consumer groups of "+d.counts.Database().Name(), cur, err)
	if err != nil {
		return nil, err
	}

	notes := make([]GroupNote, len(docs))
	for i := range docs {
		doc := &docs[i]
		notes[i] = GroupNote{Group: doc.Group, At: doc.At, Now: doc.Now, Counts: doc.Counts}
		for _, member := range doc.Members {
			if member.isFresh(doc.Now) {
				notes[i].Stops = append(notes[i].Stops, member.Stops...)
			}
		}
	}
	return notes, nil
}
