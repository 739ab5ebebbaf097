package cron

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// maxFiringsPerTransaction limits the firings that one transaction appends.
const maxFiringsPerTransaction = 500

// entryState is the stored state of an entry.
type entryState struct {
	Name     string    `bson:"_id"`
	Schedule string    `bson:"schedule"` // expression and zone
	Last     time.Time `bson:"last"`     // the last firing that was appended
	Updated  time.Time `bson:"updated"`  // by the clock of the server
}

// stateCollection returns the collection that holds the state of all entries.
func (c *Cron) stateCollection() *mongo.Collection {
	coll := c.parts.Collection
	return coll.Database().Collection(coll.Name() + "_cron")
}

// advanceEntry appends the missing firings of entry and stores its state, in one transaction. It
// returns the time of the next check. If another process has another schedule for entry, this process
// leaves entry alone.
func (c *Cron) advanceEntry(ctx context.Context, entry *entry, now time.Time) (time.Time, error) {
	var next time.Time
	err := transaction.Run(ctx, c.parts.Collection.Database().Client(), func(ctx context.Context) error {
		state, known, err := c.loadState(ctx, entry.Name)
		if err != nil {
			return err
		}

		changed := known && state.Schedule != entry.spec
		if changed && entry.started {
			// A process that started later has taken the entry over.
			next = now.Add(checkInterval)
			c.logForeignSchedule(ctx, entry, state)
			return nil
		}
		// The firings of the old schedule that are in the outbox already must not fire.
		var sent map[event.ID]bool
		if changed {
			if sent, err = c.cancelAhead(ctx, state, now); err != nil {
				return err
			}
		}

		// Without this step, the entry would not fire before that time comes. A relay may have sent the next firings already.
		isWrong := state.Updated.After(now.Add(maxClockStep))
		if isWrong {
			c.parts.Log.WarnContext(ctx, "the clock of the server was ahead when a cron entry was last updated; the entry starts again",
				"entry", entry.Name, "collection", c.parts.Collection.Name(), "last", state.Last, "updated", state.Updated, "now", now)
			state.Last = now.Add(claimAhead)
		}
		// A new schedule has no missed firings.
		if changed || !known {
			state.Last = now
		}

		firings, last := entry.missingFirings(state.Last, now)
		next = entry.nextCheckTime(last, now)
		// Without a change, the transaction writes nothing and conflicts with no one.
		isStored := known && !changed && !isWrong && last.Equal(state.Last)
		if len(firings) == 0 && isStored {
			return nil
		}
		if err := c.appendFirings(ctx, entry, firings, sent); err != nil {
			return err
		}

		return c.saveState(ctx, entryState{Name: entry.Name, Schedule: entry.spec, Last: last, Updated: now})
	})
	return next, err
}

const (
	// maxClockStep is how far clocks of servers may differ. A clock that has the time of another zone differs by less.
	maxClockStep = 24 * time.Hour
	// claimAhead is longer than the time before a firing in which a relay may send it.
	claimAhead = 2 * time.Second
)

// missingFirings returns the firings to append after last, the latest firing that was appended: the
// missed ones according to the policy, those within the time Ahead, and at least one in the future.
// end is the new latest firing. At most maxFiringsPerTransaction firings of a kind are returned.
func (e *entry) missingFirings(last, now time.Time) (list []time.Time, end time.Time) {
	end = last
	if !last.After(now) {
		switch e.Missed {
		case All:
			for at := e.nextFiring(end); !at.IsZero() && !at.After(now) && len(list) < maxFiringsPerTransaction; at = e.nextFiring(at) {
				list, end = append(list, at), at
			}

			// The next transaction appends the rest.
			if len(list) == maxFiringsPerTransaction {
				return list, end
			}
		case Once:
			if at := e.latestFiring(last, now); !at.IsZero() {
				list = append(list, at)
			}
			end = now
		case Skip:
			end = now
		}
	}

	ahead := now.Add(e.Ahead)
	for at := e.nextFiring(end); !at.IsZero() && len(list) < maxFiringsPerTransaction; at = e.nextFiring(at) {
		// A firing in the future has been appended already.
		if at.After(ahead) && end.After(now) {
			break
		}
		list, end = append(list, at), at
	}

	return list, end
}

// nextCheckTime returns when to check an entry again whose latest appended firing is last: when
// last fires, or earlier, when half of the time Ahead before the following firing is used up.
func (e *entry) nextCheckTime(last, now time.Time) time.Time {
	following := e.nextFiring(last)
	half := following.Add(-e.Ahead / 2)
	switch {
	case following.IsZero():
		return now.Add(checkInterval)
	case !last.After(now):
		// Many firings were missed, and more have to be appended.
		return now
	case half.Before(last):
		return half
	}
	return last
}

// loadState returns the stored state of entry name. known is false if there is none.
func (c *Cron) loadState(ctx context.Context, name string) (state entryState, known bool, err error) {
	err = c.stateCollection().FindOne(ctx, bson.D{{Key: "_id", Value: name}}).Decode(&state)
	switch {
	case errors.Is(err, mongo.ErrNoDocuments):
		return state, false, nil
	case err != nil:
		return state, false, fmt.Errorf("reading the state of cron entry %q: %w", name, err)
	}
	return state, true, nil
}

// saveState stores the state of an entry.
func (c *Cron) saveState(ctx context.Context, state entryState) error {
	filter := bson.D{{Key: "_id", Value: state.Name}}
	_, err := c.stateCollection().ReplaceOne(ctx, filter, state, options.Replace().SetUpsert(true))
	if err != nil {
		return fmt.Errorf("writing the state of cron entry %q: %w", state.Name, err)
	}
	return nil
}

// appendFirings appends the events of the firings that were not sent and are not in the outbox yet. Some can be there if the state
// of the entry was removed.
func (c *Cron) appendFirings(ctx context.Context, entry *entry, list []time.Time, sent map[event.ID]bool) error {
	ids := make([]event.ID, len(list))
	for i, at := range list {
		ids[i] = event.NewID(c.firingID(entry.Name, at))
	}

	exists, err := c.findStored(ctx, entry.Name, ids)
	if err != nil {
		return err
	}

	var events []event.Event
	for i, at := range list {
		if !exists[ids[i]] && !sent[ids[i]] {
			events = append(events, entry.makeEvent(c.firingID(entry.Name, at), at))
		}
	}

	return c.box.Append(ctx, events...)
}

// findStored returns which firings of entry name are in the outbox. An insert of an existing id would abort the transaction.
func (c *Cron) findStored(ctx context.Context, name string, ids []event.ID) (map[event.ID]bool, error) {
	filter := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}
	cur, err := cursor.Find(ctx, c.parts.Collection, filter, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
	type firing struct {
		ID event.ID `bson:"_id"`
	}
	list, err := cursor.All[firing](ctx, fmt.Sprintf("looking for firings of cron entry %q", name), cur, err)

	found := make(map[event.ID]bool, len(list))
	for _, doc := range list {
		found[doc.ID] = true
	}
	return found, err
}

// cancelAhead cancels the pending firings of the expression in state. It returns the firings after now that it could not cancel,
// because the relay has claimed them and sends them. If the expression or its zone is unknown to this process, it cancels nothing.
func (c *Cron) cancelAhead(ctx context.Context, state entryState, now time.Time) (sent map[event.ID]bool, err error) {
	spec, zoneName, _ := strings.Cut(state.Schedule, " in ")
	fires, err := parseSchedule(spec)
	if err != nil {
		return nil, nil //nolint:nilerr // the expression of another version: its firings are unknown
	}

	zone, err := time.LoadLocation(zoneName)
	if err != nil {
		return nil, nil //nolint:nilerr // a zone that this machine does not have
	}

	// The ids of firings are derived from the name and the time, so they need not be stored.
	ids := []event.ID{}
	for at := nextFiringIn(fires, zone, now); !at.IsZero() && !at.After(state.Last); at = nextFiringIn(fires, zone, at) {
		ids = append(ids, event.NewID(c.firingID(state.Name, at)))
	}

	if len(ids) == 0 {
		return nil, nil
	}

	pending, err := c.findStored(ctx, state.Name, ids)
	if err != nil {
		return nil, err
	}
	sent = make(map[event.ID]bool)
	for _, id := range ids {
		sent[id] = !pending[id]
	}

	// A claim since that read conflicts with the cancellation, and the transaction runs again.
	_, err = c.box.CancelScheduled(ctx, outbox.ScheduledQuery{IDs: ids})
	return sent, err
}

// Forget removes the entry name after it was deleted from the code: it cancels the pending firings
// and deletes the stored state, in one transaction. It returns nil if there is no such entry. If a
// process still runs the entry, the entry starts again.
func (c *Cron) Forget(ctx context.Context, name string) error {
	now, err := c.serverTime(ctx)
	if err != nil {
		return fmt.Errorf("forgetting cron entry %q: %w", name, err)
	}

	return transaction.Run(ctx, c.parts.Collection.Database().Client(), func(ctx context.Context) error {
		state, known, err := c.loadState(ctx, name)
		if err != nil || !known {
			return err
		}
		// Together with the state, in one transaction: otherwise, firings without an entry could stay.
		if _, err := c.cancelAhead(ctx, state, now); err != nil {
			return err
		}
		if _, err := c.stateCollection().DeleteOne(ctx, bson.D{{Key: "_id", Value: name}}); err != nil {
			return fmt.Errorf("removing the state of cron entry %q: %w", name, err)
		}

		return nil
	})
}

// logForeignSchedule logs, once, that a process that started later has another schedule for entry.
func (c *Cron) logForeignSchedule(ctx context.Context, entry *entry, state entryState) {
	if entry.foreignLogged {
		return
	}

	entry.foreignLogged = true
	c.parts.Log.WarnContext(ctx, "cron entry has another schedule in a newer process; ignoring it here",
		"entry", entry.Name, "collection", c.parts.Collection.Name(), "schedule", entry.spec, "theirs", state.Schedule)
}
