package inbox_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	mongoevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/x/mongo/driver"
)

// sent is a command for one of the collections of the inbox.
type sent struct {
	name, coll string
	raw        bson.Raw
	time       uint32 // the seconds of the last operation time that a response had before it was sent
}

// watch records the commands of a client, and counts the write conflicts in the responses.
type watch struct {
	mu        sync.Mutex
	cmds      []sent
	conflicts int
	last      uint32
	seen      func(sent) // called for each command, if not nil
}

func (w *watch) options() *options.ClientOptions {
	return options.Client().SetMonitor(&mongoevent.CommandMonitor{
		Started: func(_ context.Context, e *mongoevent.CommandStartedEvent) {
			elems, err := e.Command.Elements()
			if err != nil {
				return
			}

			coll, _ := elems[0].Value().StringValueOK()
			w.mu.Lock()
			s := sent{elems[0].Key(), coll, slices.Clone(e.Command), w.last}
			w.cmds = append(w.cmds, s)
			seen := w.seen
			w.mu.Unlock()
			if seen != nil {
				seen(s)
			}
		},
		Succeeded: func(_ context.Context, e *mongoevent.CommandSucceededEvent) {
			w.mu.Lock()
			defer w.mu.Unlock()
			if t, _, ok := e.Reply.Lookup("operationTime").TimestampOK(); ok {
				w.last = max(w.last, t)
			}
		},
		Failed: func(_ context.Context, e *mongoevent.CommandFailedEvent) {
			// The methods of mongo do not return this type yet.
			var de driver.Error
			if errors.As(e.Failure, &de) && de.Code == 112 {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.conflicts++
			}
		},
	})
}

func (w *watch) reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cmds, w.conflicts = nil, 0
}

func (w *watch) countConflicts() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.conflicts
}

func (w *watch) commandsOn(coll string) []sent {
	w.mu.Lock()
	defer w.mu.Unlock()
	var found []sent
	for _, c := range w.cmds {
		if c.coll == coll {
			found = append(found, c)
		}
	}
	return found
}

// commandNames returns the names of the commands for the collections, in order.
func (w *watch) commandNames(colls ...string) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []string
	for _, c := range w.cmds {
		if slices.Contains(colls, c.coll) {
			names = append(names, c.name+" "+c.coll)
		}
	}
	return names
}

// findDates returns all dates in a document at any depth.
func findDates(raw bson.Raw) []time.Time {
	var all []time.Time
	elems, err := raw.Elements()
	if err != nil {
		return nil
	}

	for _, e := range elems {
		switch v := e.Value(); v.Type {
		case bson.TypeDateTime:
			all = append(all, v.Time())
		case bson.TypeEmbeddedDocument:
			all = append(all, findDates(v.Document())...)
		case bson.TypeArray:
			all = append(all, findDates(bson.Raw(v.Array()))...)
		}
	}

	return all
}
