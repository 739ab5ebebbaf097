package inbox

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// storedState contains the stored documents for a list of entries.
type storedState struct {
	marks   marks
	ids     []bson.Raw          // _id of the marker of each entry, or nil if the watermark alone identifies it
	markers map[string]marker   // by _id
	leases  map[string]leaseDoc // of claimed messages, by _id
}

// leaseDoc is the document of a lease.

type leaseDoc struct {
	ID    bson.Raw  `bson:"_id"`
	Owner string    `bson:"o"`
	Epoch int64     `bson:"e"`
	Until time.Time `bson:"until"`
	Live  bool      `bson:"live"`
}

// readState reads the watermarks first: they determine the generation of an identity, and which
// entries need no marker. MongoDB does not allow one command for both in a transaction.
func (x *Inbox) readState(ctx context.Context, list []Entry) (*storedState, error) {
	r := &storedState{
		ids:     make([]bson.Raw, len(list)),
		markers: make(map[string]marker),
		leases:  make(map[string]leaseDoc),
	}

	lanes := make(map[lane]struct{})
	for _, e := range list {
		if e.Place.Topic != "" {
			lanes[entryLane(e)] = struct{}{}
		}
	}

	// The generation is a part of the identity, so the watermarks come first.
	var err error
	if r.marks, err = x.readMarks(ctx, lanes); err != nil {
		return nil, err
	}

	ids := make(bson.A, 0, len(list))
	for i, e := range list {
		var generation int64
		if e.Place.Topic != "" {
			l := entryLane(e)
			generation = r.marks.currentGeneration(l.partition, l.lane)
			handled := e.Place.Offset < r.marks.nextOffset(l, generation)
			if handled || x.identityKind == IDAndConsumer && e.isPlaceID() {
				// The watermark is sufficient.
				continue
			}
		}

		if r.ids[i], err = x.markerID(e, generation); err != nil {
			return nil, err
		}
		ids = append(ids, r.ids[i])
	}

	if err := x.readMarkers(ctx, r, ids); err != nil {
		return nil, err
	}

	return r, x.readLeases(ctx, r)
}

// readMarkers reads the markers with these ids into r.
func (x *Inbox) readMarkers(ctx context.Context, r *storedState, ids bson.A) error {
	if len(ids) == 0 {
		return nil
	}

	fields := bson.D{{Key: "s", Value: 1}, {Key: "o", Value: 1}, {Key: "e", Value: 1}}
	filter := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}
	cur, err := x.markers.Find(ctx, filter, options.Find().SetProjection(fields))
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

// readLeases reads the leases of claimed messages into r. Usually there are none, which costs
// nothing.
func (x *Inbox) readLeases(ctx context.Context, r *storedState) error {
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

// decision is the treatment of a list of entries.
type decision struct {
	fresh    []bool
	insert   []int // entries that get a new marker
	takeOver []int // entries whose marker belongs to an expired claim
}

// decideEntries decides about the entries on the basis of the stored documents. The error is a
// *ClaimedError or a *StaleError.
func (x *Inbox) decideEntries(list []Entry, r *storedState) (decision, error) {
	v := decision{fresh: make([]bool, len(list))}
	seen := make(map[string]struct{}, len(list))
	for i, e := range list {
		if e.Place.Topic != "" {
			l := entryLane(e)
			g := r.marks.currentGeneration(l.partition, l.lane)
			if err := x.checkAttached(l.partition, g); err != nil {
				return v, err
			}
			if e.Place.Offset < r.marks.nextOffset(l, g) {
				continue
			}
		}

		// An entry without a marker is identified by its place.
		id := string(r.ids[i])
		if r.ids[i] == nil {
			id = e.Key.Consumer + "\x00" + e.Key.ID
		}
		if _, ok := seen[id]; ok {
			continue
		}

		seen[id] = struct{}{}

		m, marked := r.markers[string(r.ids[i])]
		switch {
		case r.ids[i] == nil:
			// The watermark is sufficient.
		case !marked:
			v.insert = append(v.insert, i)
		case m.State != stateClaimed:
			continue
		case r.leases[id].Live:
			return v, &ClaimedError{Key: e.Key, Until: r.leases[id].Until}
		default:
			v.takeOver = append(v.takeOver, i)
		}

		v.fresh[i] = true
	}

	return v, nil
}
