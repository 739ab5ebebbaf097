package inbox

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// reading is what the collections say about a list of entries.
type reading struct {
	marks   marks
	ids     []bson.Raw          // the marker's _id of each entry; nil if the watermark alone identifies it
	markers map[string]marker   // by _id
	leases  map[string]leaseDoc // of the claimed ones, by _id
}

type leaseDoc struct {
	ID    bson.Raw  `bson:"_id"`
	Owner string    `bson:"o"`
	Epoch int64     `bson:"e"`
	Until time.Time `bson:"until"`
	Live  bool      `bson:"live"`
}

// read asks for the watermarks first: they say which generation an identity belongs to, and which entries need not be looked
// for any further. Joining both in one command is refused inside of transactions.
func (x *Inbox) read(ctx context.Context, list []Entry) (*reading, error) {
	r := &reading{ids: make([]bson.Raw, len(list)), markers: make(map[string]marker), leases: make(map[string]leaseDoc)}
	lanes := make(map[lane]struct{})
	for _, e := range list {
		if e.Place.Topic != "" {
			lanes[laneOf(e)] = struct{}{}
		}
	}
	var err error
	if r.marks, err = x.readMarks(ctx, lanes); err != nil {
		return nil, err
	}
	ask := make(bson.A, 0, len(list))
	for i, e := range list {
		var generation int64
		if e.Place.Topic != "" {
			l := laneOf(e)
			generation = r.marks.generation(l.partition, l.lane)
			if e.Place.Offset < r.marks.next(l, generation) || x.identityKind == IDAndConsumer && e.derived() {
				continue // known by its place
			}
		}
		if r.ids[i], err = x.identity(e, generation); err != nil {
			return nil, err
		}
		ask = append(ask, r.ids[i])
	}
	if err := x.readMarkers(ctx, r, ask); err != nil {
		return nil, err
	}
	return r, x.readLeases(ctx, r)
}

func (x *Inbox) readMarkers(ctx context.Context, r *reading, ids bson.A) error {
	if len(ids) == 0 {
		return nil
	}
	fields := bson.D{{Key: "s", Value: 1}, {Key: "o", Value: 1}, {Key: "e", Value: 1}}
	cur, err := x.markers.Find(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, options.Find().SetProjection(fields))
	if err != nil {
		return fmt.Errorf("reading markers: %w", err)
	}
	var docs []marker
	if err := cur.All(ctx, &docs); err != nil {
		return fmt.Errorf("reading markers: %w", err)
	}
	for _, m := range docs {
		r.markers[string(m.ID)] = m
	}
	return nil
}

// readLeases asks for the leases of what is claimed, which hardly ever is anything.
func (x *Inbox) readLeases(ctx context.Context, r *reading) error {
	var ids bson.A
	for _, m := range r.markers {
		if m.State == stateClaimed {
			ids = append(ids, m.ID)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	cur, err := x.claims.Aggregate(ctx, bson.A{
		bson.D{{Key: "$match", Value: bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}}},
		bson.D{{Key: "$set", Value: bson.D{{Key: "live", Value: bson.D{{Key: "$gt", Value: bson.A{"$until", "$$NOW"}}}}}}},
	})
	if err != nil {
		return fmt.Errorf("reading claims: %w", err)
	}
	var docs []leaseDoc
	if err := cur.All(ctx, &docs); err != nil {
		return fmt.Errorf("reading claims: %w", err)
	}
	for _, d := range docs {
		r.leases[string(d.ID)] = d
	}
	return nil
}

// verdict is what becomes of a list of entries.
type verdict struct {
	fresh  []bool
	insert []int // entries that get a new marker
	retake []int // entries whose marker is an expired claim's
}

// decide judges the entries by what was read. It refuses entries that somebody holds, and partitions of which another
// process knows a later generation.
func (x *Inbox) decide(list []Entry, r *reading) (verdict, error) {
	v := verdict{fresh: make([]bool, len(list))}
	seen := make(map[string]struct{}, len(list))
	for i, e := range list {
		if e.Place.Topic != "" {
			l := laneOf(e)
			g := r.marks.generation(l.partition, l.lane)
			if err := x.checkAttached(l.partition, g); err != nil {
				return v, err
			}
			if e.Place.Offset < r.marks.next(l, g) {
				continue
			}
		}
		id := string(r.ids[i])
		if r.ids[i] == nil { // known by its place alone
			id = e.Key.Consumer + "\x00" + e.Key.ID
		}
		if _, ok := seen[id]; ok {
			continue
		}
		seen[id] = struct{}{}
		m, marked := r.markers[string(r.ids[i])]
		switch {
		case r.ids[i] == nil:
		case !marked:
			v.insert = append(v.insert, i)
		case m.State != stateClaimed:
			continue
		case r.leases[id].Live:
			return v, &ClaimedError{Key: e.Key, Until: r.leases[id].Until}
		default:
			v.retake = append(v.retake, i)
		}
		v.fresh[i] = true
	}
	return v, nil
}
