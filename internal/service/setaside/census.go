package setaside

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

const (
	// CensusInterval is how long a Census is used.
	CensusInterval = 5 * time.Second
	// keeperGrace is how late the keeper of a group may be before another member counts.
	keeperGrace = 5 * time.Second
	// readLimit is how long the read of a Census may take.
	readLimit = 5 * time.Second
	// countLimit is how long a count may take before another member counts too.
	countLimit = 30 * time.Second
	// maxCountShare is the share of its time that a keeper may count: one of so many.
	maxCountShare = 20
)

// Census describes the messages of a group that wait.
type Census struct {
	Counts   []Count
	At       time.Time // of the count, by the server's clock
	Now      time.Time // by the server's clock
	Keeper   bool      // the caller is the member that counts
	Handlers []string  // the names of the handlers of all members that run
}

// Count describes the messages of a handler that wait in one topic.
type Count struct {
	Handler string    `bson:"h"`
	Topic   string    `bson:"t"`
	N       int64     `bson:"n"`
	Since   time.Time `bson:"since,omitempty"` // of the first failure; zero if no message has failed
	// Unread is set if no member of the group reads the Partitions. The messages of other partitions are in another Count.
	Unread     bool    `bson:"u,omitempty"`
	Partitions []int32 `bson:"p,omitempty"` // in order; only if Unread is set
}

// storedCensus is the document of a group.
type storedCensus struct {
	Group   string    `bson:"_id"`
	By      string    `bson:"by"`  // the keeper
	At      time.Time `bson:"at"`  // of the last count
	Due     time.Time `bson:"due"` // of the next count
	Counts  []Count   `bson:"counts"`
	Members Members   `bson:"members"`
	Now     time.Time `bson:"now,omitempty"` // of the read; not stored
}

// PlaceCount is the number of messages of a place.
type PlaceCount struct {
	Place Place     `bson:"_id"`
	N     int64     `bson:"n"`
	Since time.Time `bson:"since"` // of the first failure; zero if no message has failed
}

// Census returns how many messages of a group wait: see Store.
func (s *Collection) Census(
	ctx context.Context, member Member, findUnread func(ctx context.Context, places []Place) ([]Place, error),
) (Census, error) {
	doc, err := s.readCensus(ctx, member.Group)
	if err != nil {
		return Census{}, err
	}

	// A count may take long, so the record is stored first.
	if doc.Members.NeedRecord(member, doc.Now) {
		if doc, err = s.recordMember(ctx, member); err != nil {
			return Census{}, err
		}
	}

	late := doc.Now.Sub(doc.Due)
	if due := late >= 0 && (doc.By == member.ID || late >= keeperGrace || doc.Due.IsZero()); due {
		claimed, err := s.claimCensus(ctx, doc, member.ID)
		if err != nil {
			return Census{}, err
		}
		if claimed {
			if err := s.takeCensus(ctx, doc, member, findUnread); err != nil {
				return Census{}, err
			}
			if doc, err = s.readCensus(ctx, member.Group); err != nil {
				return Census{}, err
			}
		}
	}

	keeper := doc.By == member.ID && doc.Now.Before(doc.Due.Add(keeperGrace))
	return Census{Counts: doc.Counts, At: doc.At, Now: doc.Now, Keeper: keeper, Handlers: doc.Members.ListHandlers(doc.Now)}, nil
}

// Handlers returns the names of the handlers of a group: see Store.
func (s *Collection) Handlers(ctx context.Context, group string) ([]string, error) {
	doc, err := s.readCensus(ctx, group)
	if err != nil {
		return nil, err
	}
	return doc.Members.ListHandlers(doc.Now), nil
}

// readCensus reads the document of a group. Without one, it returns the time of the server alone.
func (s *Collection) readCensus(ctx context.Context, group string) (*storedCensus, error) {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()

	// An aggregation returns the server's time with the document.
	cur, err := cursor.Aggregate(ctx, s.counts, mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "_id", Value: group}}}},
		{{Key: "$set", Value: bson.D{{Key: "now", Value: "$$NOW"}}}},
	})
	if err != nil {
		return nil, fmt.Errorf("reading the counts of group %s: %w", group, err)
	}
	var docs []storedCensus
	if err := cur.All(ctx, &docs); err != nil {
		return nil, fmt.Errorf("reading the counts of group %s: %w", group, err)
	}

	// A group without a document has no counts yet.
	if len(docs) == 0 {
		return &storedCensus{Group: group}, nil
	}
	return &docs[0], nil
}

// claimCensus makes member the keeper, unless the document has changed since doc was read.
func (s *Collection) claimCensus(ctx context.Context, doc *storedCensus, member string) (bool, error) {
	unchanged := bson.D{{Key: "_id", Value: doc.Group}, {Key: "due", Value: doc.Due}}
	if doc.Due.IsZero() {
		unchanged[1].Value = nil
	}

	claim := mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "by", Value: bson.D{{Key: "$literal", Value: member}}}, {Key: "due", Value: mongodb.AfterNow(countLimit)},
	}}}}

	// If another member has claimed it since the read, the filter matches nothing, or the insert has a duplicate key.
	res, err := s.counts.UpdateOne(ctx, unchanged, claim, options.UpdateOne().SetUpsert(doc.Due.IsZero()))
	if mongo.IsDuplicateKeyError(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("becoming the keeper of group %s: %w", doc.Group, err)
	}
	return res.MatchedCount+res.UpsertedCount > 0, nil
}

// takeCensus counts the messages of the group and stores the counts.
func (s *Collection) takeCensus(
	ctx context.Context, doc *storedCensus, member Member, findUnread func(ctx context.Context, places []Place) ([]Place, error),
) error {
	ctx, cancel := context.WithTimeout(ctx, countLimit)
	defer cancel()
	began := time.Now()
	// The index "queues" has all fields, so no message is read.
	places, err := aggregate[PlaceCount](ctx, s, "counting the messages that are set aside", mongo.Pipeline{
		{{Key: "$match", Value: inGroup(doc.Group)}},
		{{Key: "$project", Value: bson.D{
			{Key: "_id", Value: 0}, {Key: "h", Value: 1}, {Key: "t", Value: 1}, {Key: "p", Value: 1}, {Key: "since", Value: 1},
		}}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "h", Value: "$h"}, {Key: "t", Value: "$t"}, {Key: "p", Value: "$p"}}},
			{Key: "n", Value: bson.D{{Key: "$sum", Value: 1}}},
			{Key: "since", Value: bson.D{{Key: "$min", Value: "$since"}}},
		}}},
	})
	if err != nil {
		return err
	}
	took := time.Since(began)

	list := make([]Place, len(places))
	for i, p := range places {
		list[i] = p.Place
	}
	// The counts are stored in any case: they do not depend on Kafka.
	unread, unreadErr := findUnread(ctx, list)

	mine := bson.D{{Key: "_id", Value: doc.Group}, {Key: "by", Value: member.ID}}
	_, err = s.counts.UpdateOne(ctx, mine, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "at", Value: "$$NOW"},
		{Key: "due", Value: mongodb.AfterNow(max(CensusInterval, maxCountShare*took))},
		{Key: "counts", Value: bson.D{{Key: "$literal", Value: SumPlaces(places, unread)}}},
		{Key: "members", Value: freshMembers()},
	}}}})
	if err != nil {
		err = fmt.Errorf("storing the counts of group %s: %w", doc.Group, err)
	}
	return errors.Join(err, unreadErr)
}

// SumPlaces returns the sums of the places for each handler and topic, in order. The unread places have separate sums.
func SumPlaces(places []PlaceCount, unread []Place) []Count {
	type key struct {
		handler, topic string
		unread         bool
	}
	isUnread := map[Place]bool{}
	for _, p := range unread {
		isUnread[p] = true
	}

	sums := map[key]*Count{}
	for _, p := range places {
		key := key{p.Place.Handler, p.Place.Topic, isUnread[p.Place]}
		count := sums[key]
		if count == nil {
			count = &Count{Handler: key.handler, Topic: key.topic, Unread: key.unread}
			sums[key] = count
		}
		count.N += p.N
		if key.unread {
			count.Partitions = append(count.Partitions, p.Place.Partition)
		}
		if !p.Since.IsZero() && (count.Since.IsZero() || p.Since.Before(count.Since)) {
			count.Since = p.Since
		}
	}

	list := make([]Count, 0, len(sums))
	for _, c := range sums {
		slices.Sort(c.Partitions)
		list = append(list, *c)
	}
	slices.SortFunc(list, func(a, b Count) int {
		return cmp.Or(strings.Compare(a.Handler, b.Handler), strings.Compare(a.Topic, b.Topic), cmp.Compare(len(a.Partitions), len(b.Partitions)))
	})
	return list
}
