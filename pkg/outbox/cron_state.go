package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/event"
)

// cronBatch is how many firings one transaction appends.
const cronBatch = 500

// cronState is what is stored of an entry.
type cronState struct {
	Name     string    `bson:"_id"`
	Schedule string    `bson:"schedule"` // expression and zone
	Last     time.Time `bson:"last"`     // the last firing that was appended
}

func (c *Cron) states() *mongo.Collection {
	return c.box.coll.Database().Collection(c.box.collection + "_cron")
}

// step appends what an entry lacks, and returns when there is more to do.
func (c *Cron) step(ctx context.Context, e *cronEntry, now time.Time) (time.Time, error) {
	var next time.Time
	err := Transaction(ctx, c.box.coll.Database().Client(), func(ctx context.Context) error {
		state, known, err := c.load(ctx, e.Name)
		if err != nil {
			return err
		}
		switch changed := known && state.Schedule != e.spec; {
		case changed && e.started:
			next = now.Add(cronLook)
			c.tellForeign(ctx, e, state)
			return nil
		case changed:
			if err := c.cancelAhead(ctx, state, now); err != nil {
				return err
			}
			state.Last = now
		case !known:
			state.Last = now
		}
		list, last := e.lacking(state.Last, now)
		next = e.wake(last, now)
		if len(list) == 0 && known && state.Schedule == e.spec && last.Equal(state.Last) {
			return nil
		}
		if err := c.append(ctx, e, list); err != nil {
			return err
		}
		return c.save(ctx, cronState{Name: e.Name, Schedule: e.spec, Last: last})
	})
	if mongo.IsDuplicateKeyError(err) {
		return now, nil // another process was quicker; look again
	}
	return next, err
}

// lacking are the firings to append when last is the latest that was: what was missed, as the policy has it, those within
// the time ahead, and at least one that is to come. It returns the new last firing, too.
func (e *cronEntry) lacking(last, now time.Time) (list []time.Time, end time.Time) {
	end = last
	if !last.After(now) {
		switch e.Missed {
		case MissedAll:
			for at := e.after(end); !at.IsZero() && !at.After(now) && len(list) < cronBatch; at = e.after(at) {
				list, end = append(list, at), at
			}
			if len(list) == cronBatch {
				return list, end
			}
		case MissedOnce:
			if at := e.latest(last, now); !at.IsZero() {
				list = append(list, at)
			}
			end = now
		case MissedSkip:
			end = now
		}
	}
	ahead := now.Add(e.Ahead)
	for at := e.after(end); !at.IsZero() && len(list) < cronBatch; at = e.after(at) {
		if at.After(ahead) && end.After(now) {
			break // there is one to come already
		}
		list, end = append(list, at), at
	}
	return list, end
}

// wake is when an entry whose last appended firing is that one is to be looked at again: when it fires, or when half of the
// time ahead is used up.
func (e *cronEntry) wake(last, now time.Time) time.Time {
	following := e.after(last)
	switch half := following.Add(-e.Ahead / 2); {
	case following.IsZero():
		return now.Add(cronLook)
	case !last.After(now):
		return now // many were missed, and more are to be appended
	case half.Before(last):
		return half
	}
	return last
}

func (c *Cron) load(ctx context.Context, name string) (state cronState, known bool, err error) {
	err = c.states().FindOne(ctx, bson.D{{Key: "_id", Value: name}}).Decode(&state)
	switch {
	case errors.Is(err, mongo.ErrNoDocuments):
		return state, false, nil
	case err != nil:
		return state, false, fmt.Errorf("reading the state of cron entry %q: %w", name, err)
	}
	return state, true, nil
}

func (c *Cron) save(ctx context.Context, state cronState) error {
	_, err := c.states().ReplaceOne(ctx, bson.D{{Key: "_id", Value: state.Name}}, state, options.Replace().SetUpsert(true))
	if err != nil {
		return fmt.Errorf("writing the state of cron entry %q: %w", state.Name, err)
	}
	return nil
}

// append writes the events of firings, but for those that are in the outbox already: the state may have been removed.
func (c *Cron) append(ctx context.Context, e *cronEntry, list []time.Time) error {
	ids := make([]event.ID, len(list))
	for i, at := range list {
		ids[i] = c.box.CronID(e.Name, at)
	}
	cur, err := c.box.coll.Find(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
	if err != nil {
		return fmt.Errorf("looking for firings of cron entry %q: %w", e.Name, err)
	}
	var there []struct {
		ID event.ID `bson:"_id"`
	}
	if err := cur.All(ctx, &there); err != nil {
		return fmt.Errorf("looking for firings of cron entry %q: %w", e.Name, err)
	}
	have := make(map[event.ID]bool, len(there))
	for _, d := range there {
		have[d.ID] = true
	}
	var events []event.Event
	for i, at := range list {
		if !have[ids[i]] {
			events = append(events, e.firing(c.box.cronUUID(e.Name, at), at))
		}
	}
	return c.box.AppendMany(ctx, events)
}

// cancelAhead takes back the firings of an expression of before that are still to come.
func (c *Cron) cancelAhead(ctx context.Context, state cronState, now time.Time) error {
	spec, zoneName, _ := strings.Cut(state.Schedule, " in ")
	fires, err := parseCron(spec)
	if err != nil {
		return nil //nolint:nilerr // nobody knows what it meant
	}
	zone, err := time.LoadLocation(zoneName)
	if err != nil {
		return nil //nolint:nilerr // nobody knows where that was
	}
	ids := []event.ID{}
	for at := firing(fires, zone, now); !at.IsZero() && !at.After(state.Last); at = firing(fires, zone, at) {
		ids = append(ids, c.box.CronID(state.Name, at))
	}
	if len(ids) == 0 {
		return nil
	}
	_, err = c.box.CancelScheduled(ctx, ScheduledQuery{IDs: ids})
	return err
}

// Forget ends an entry that is no longer kept: its firings that are still ahead are cancelled, and its state is removed. It
// is no error if there is none. Where a process still keeps the entry, it begins anew.
func (c *Cron) Forget(ctx context.Context, name string) error {
	now, err := c.serverTime(ctx)
	if err != nil {
		return fmt.Errorf("forgetting cron entry %q: %w", name, err)
	}
	return Transaction(ctx, c.box.coll.Database().Client(), func(ctx context.Context) error {
		state, known, err := c.load(ctx, name)
		if err != nil || !known {
			return err
		}
		if err := c.cancelAhead(ctx, state, now); err != nil {
			return err
		}
		if _, err := c.states().DeleteOne(ctx, bson.D{{Key: "_id", Value: name}}); err != nil {
			return fmt.Errorf("removing the state of cron entry %q: %w", name, err)
		}
		return nil
	})
}

// tellForeign says once that a process that started later has the entry with another expression.
func (c *Cron) tellForeign(ctx context.Context, e *cronEntry, state cronState) {
	if e.told {
		return
	}
	e.told = true
	c.box.log.WarnContext(ctx, "a cron entry is kept by a process that has another schedule for it; this one leaves it alone",
		"entry", e.Name, "collection", c.box.collection, "schedule", e.spec, "theirs", state.Schedule)
}
