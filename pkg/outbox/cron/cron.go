// Package cron appends recurring events to an outbox ahead of their time. Any number of processes may run the
// same entries: each firing is appended once.
//
// Order: the firings of an entry are appended in the order of their times. Like all scheduled events, they have no
// place in the order of their key. Blocking: Run blocks until its context ends. Cost: one transaction for each entry
// when a firing has to be appended, and one read of the server's time for each check.
package cron

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/google/uuid"
	robfig "github.com/robfig/cron/v3"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/service/appending"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Missed decides about the firings whose time passed while no process ran the Cron. Firings that
// were appended before are not missed: the relay delivers them.
type Missed uint8

// Policies for missed firings.
const (
	Once Missed = iota // deliver the latest missed firing at once
	Skip               // deliver none
	All                // deliver each missed firing at once
)

// Entry describes an event that fires repeatedly.
type Entry struct {
	// Name identifies the entry in its outbox. It is required and has at most 200 bytes. The ids of
	// the events and the stored state contain it.
	Name string

	// Schedule is a cron expression of five fields: minute, hour, day of month, month, day of week.
	// With six fields, the first one is the second. It can also be @hourly, @daily, @weekly,
	// @monthly, @yearly, or @every with a duration of whole seconds. The duration is counted from a
	// fixed time, not from the start of the process. The prefix CRON_TZ=<zone> sets the time zone.
	Schedule string

	// Zone is the time zone of the expression. A time that does not exist because of a clock change
	// does not fire. When clocks go back, times occur twice: an expression with * as its hour fires at both, any other only at the
	// first. Defaults to UTC.
	Zone *time.Location

	// Event returns the event of a firing. The Cron sets its id and due time. Event must not have
	// effects: any process that runs the entry may call it, more than once for the same firing.
	Event func(at time.Time) event.Event

	// Missed is the policy for missed firings. Defaults to Once.
	Missed Missed

	// Ahead is how long before its time a firing is appended. During this time the service may be
	// down without missing the firing. The next firing is always appended, even if it is further
	// away. Ahead is between 1 s and 24 h and defaults to one minute.
	Ahead time.Duration
}

// Cron appends the firings of its entries ahead of their time as scheduled events, which the relay
// delivers when they are due. All times refer to the server's clock.
//
// A Cron may run in any number of processes. Each firing is appended once: its id is derived from
// the name of the entry and its time, and the same transaction writes the state of the entry. The
// state is one small document per entry in the collection <outbox>_cron, where the service needs
// the permissions find, insert and update.
//
// If processes have different expressions for an entry, the process that started last takes it over
// and cancels the pending firings of the old expression. An entry that the next release no longer
// contains fires once more, unless Forget is called.
type Cron struct {
	box     *outbox.Box
	parts   appending.Parts
	entries []*entry
}

// entry is an Entry with the state of this process.
type entry struct {
	Entry
	fires         robfig.Schedule
	spec          string // identifies the schedule in the stored state
	started       bool   // the stored state was read
	foreignLogged bool   // that another process has another expression
	nextCheck     time.Time
	failures      int // in a row
}

// New returns a Cron for the entries. It does no I/O: call Run to start it. The error joins the
// errors of all invalid entries.
func New(box *outbox.Box, entries ...Entry) (*Cron, error) {
	if box == nil {
		return nil, errors.New("cron: the box is nil")
	}

	cron := &Cron{box: box, parts: box.Parts(module.Key{})}
	if cron.parts.Collection == nil {
		return nil, errors.New("cron: the box is in memory: a Cron needs MongoDB, because it uses the clock of the server")
	}
	names := map[string]bool{}
	var errs []error

	for _, e := range entries {
		entry, err := newEntry(e)
		if err == nil && names[e.Name] {
			err = errors.New("duplicate name: another entry has it too")
		}

		// An invalid entry reserves its name as well, so that its duplicates are reported with it.
		names[e.Name] = true

		if err != nil {
			errs = append(errs, fmt.Errorf("cron entry %q: %w", e.Name, err))
			continue
		}
		cron.entries = append(cron.entries, entry)
	}

	if err := errors.Join(errs...); err != nil {
		return nil, err
	}

	return cron, nil
}

// newEntry checks given and sets its defaults. It calls given.Event once, to check the event.
func newEntry(given Entry) (*entry, error) {
	switch {
	case given.Name == "" || len(given.Name) > 200:
		return nil, errors.New("invalid name: it must have 1 to 200 bytes")
	case given.Event == nil:
		return nil, errors.New("the function Event is missing")
	case given.Missed > All:
		return nil, fmt.Errorf("invalid policy %d for missed firings", given.Missed)
	case given.Ahead < 0 || given.Ahead > 24*time.Hour:
		return nil, fmt.Errorf("invalid duration %s for Ahead: it must be between 1 s and 24 h", given.Ahead)
	case given.Ahead == 0:
		given.Ahead = time.Minute
	}

	given.Ahead = max(given.Ahead, time.Second)
	if given.Zone == nil {
		given.Zone = time.UTC
	}

	entry := &entry{Entry: given, spec: given.Schedule + " in " + given.Zone.String()}
	var err error
	if entry.fires, err = parseSchedule(given.Schedule); err != nil {
		return nil, err
	}

	at := entry.nextFiring(time.Now())
	if at.IsZero() {
		return nil, fmt.Errorf("%q never fires", given.Schedule)
	}

	// A sample shows mistakes of Event now instead of at the first firing.
	if err := entry.makeEvent(uuid.New(), at).Validate(); err != nil {
		return nil, err
	}

	return entry, nil
}

var parser = robfig.NewParser(robfig.SecondOptional | robfig.Minute | robfig.Hour | robfig.Dom | robfig.Month | robfig.Dow | robfig.Descriptor)

// parseSchedule parses a cron expression, without its time zone in Entry.Zone.
func parseSchedule(spec string) (robfig.Schedule, error) {
	// The parser panics if the expression consists of the zone only.
	if zone, _, ok := strings.Cut(spec, " "); !ok && strings.Contains(zone, "TZ=") {
		return nil, fmt.Errorf("invalid schedule %q: it has a zone but no expression", spec)
	}

	schedule, err := parser.Parse(spec)
	if err != nil {
		return nil, err
	}
	if every, ok := schedule.(robfig.ConstantDelaySchedule); ok {
		return alignedSchedule(every.Delay), nil
	}

	// The parser sets the top bit for *.
	if fields, ok := schedule.(*robfig.SpecSchedule); ok && fields.Hour>>63 == 0 {
		return clockSchedule{fields}, nil
	}
	return schedule, nil
}

// clockSchedule fires once at each time of the clock, also if clocks go back and the time occurs twice.
type clockSchedule struct{ *robfig.SpecSchedule }

// Next returns the first firing after moment, or zero if there is none.
func (c clockSchedule) Next(moment time.Time) time.Time {
	zone := c.Location
	// The parser's value for an expression without a zone.
	if zone == time.Local {
		zone = moment.Location()
	}

	at := c.SpecSchedule.Next(moment)
	for !at.IsZero() && occurredBefore(at.In(zone)) {
		at = c.SpecSchedule.Next(at)
	}
	return at
}

// occurredBefore reports whether clocks went back shortly before moment, and had shown its time already.
func occurredBefore(moment time.Time) bool {
	changed, _ := moment.ZoneBounds()
	if changed.IsZero() {
		return false
	}
	_, before := changed.Add(-time.Second).Zone()
	_, after := moment.Zone()
	return moment.Sub(changed) < time.Duration(before-after)*time.Second
}

// alignedSchedule fires at multiples of a duration, so that all processes agree on the times.
type alignedSchedule time.Duration

// Next returns the first multiple after moment.
func (a alignedSchedule) Next(moment time.Time) time.Time {
	return moment.Truncate(time.Duration(a)).Add(time.Duration(a))
}

// nextFiring returns the first firing after moment, or zero if there is none.
func (e *entry) nextFiring(moment time.Time) time.Time { return nextFiringIn(e.fires, e.Zone, moment) }

// nextFiringIn returns the first firing of schedule after moment in UTC, or zero if there is none.
func nextFiringIn(schedule robfig.Schedule, zone *time.Location, moment time.Time) time.Time {
	at := schedule.Next(moment.In(zone))
	if at.IsZero() {
		return at
	}
	return at.UTC()
}

// latestFiring returns the last firing in (start, end], or zero if there is none. It searches
// backwards in steps that double, so that a long absence costs no more than a short one.
func (e *entry) latestFiring(start, end time.Time) time.Time {
	var found time.Time
	for back := time.Second; found.IsZero(); back *= 2 {
		from := end.Add(-back)
		last := !from.After(start)
		if last {
			from = start
		}

		for at := e.nextFiring(from); !at.IsZero() && !at.After(end); at = e.nextFiring(at) {
			found = at
		}

		if last {
			break
		}
	}

	return found
}

// idNamespace is the namespace of the event ids (RFC 9562, version 5).
var idNamespace = uuid.MustParse("0d9b1c8e-7f52-4a0c-9a53-6c1d6a5b7e21")

// firingID returns the id of the event of a firing. It is derived from the outbox, the entry and the time, so
// that all processes agree on it.
func (c *Cron) firingID(name string, firedAt time.Time) uuid.UUID {
	firing := firedAt.UTC().Truncate(time.Second).Format(time.RFC3339)
	coll := c.parts.Collection
	text := coll.Database().Name() + "." + coll.Name() + "\x00" + name + "\x00" + firing
	return uuid.NewSHA1(idNamespace, []byte(text))
}

// makeEvent returns the event of the firing at firedAt.
func (e *entry) makeEvent(id uuid.UUID, firedAt time.Time) event.Event {
	return e.Event(firedAt.In(e.Zone)).With(event.WithID(id), event.WithDueAt(firedAt))
}

const (
	checkInterval = time.Minute      // between two reads of the server's clock, at most
	maxRetryDelay = 30 * time.Second // after failures of an entry
	entryTimeout  = 30 * time.Second // for one update of an entry
)

// Run appends the firings of the entries until ctx ends, and then returns nil. Failures are logged and
// retried, with delays of up to 30 s for each entry.
func (c *Cron) Run(ctx context.Context) error {
	for _, e := range c.entries {
		// After an earlier Run, another process may have changed the states: they are read again.
		e.started = false
		e.nextCheck = time.Time{}
	}

	for {
		wait := c.checkEntries(ctx)
		if ctx.Err() != nil {
			return nil
		}

		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
	}
}

// checkEntries updates the entries that are due and returns the time until the next check.
func (c *Cron) checkEntries(ctx context.Context) time.Duration {
	// Until the end of the round, the server's time is derived from the local clock.
	now, err := c.serverTime(ctx)
	asked := time.Now()
	if err != nil {
		c.parts.Log.WarnContext(ctx, "reading the server time for cron entries fails; retrying", "error", err)
		return time.Second + rand.N(time.Second)
	}

	wait := checkInterval
	for _, e := range c.entries {
		if ctx.Err() != nil {
			return 0
		}

		at := now.Add(time.Since(asked))
		if !e.nextCheck.After(at) {
			c.maintainEntry(ctx, e, at)
		}
		wait = min(wait, e.nextCheck.Sub(now)-time.Since(asked))
	}

	return max(wait, 5*time.Millisecond)
}

// maintainEntry updates entry and sets the time of its next check. A failure is logged.
func (c *Cron) maintainEntry(ctx context.Context, entry *entry, now time.Time) {
	call, cancel := context.WithTimeout(ctx, entryTimeout)
	defer cancel()

	next, err := c.advanceEntry(call, entry, now)
	if err == nil {
		entry.started = true
		entry.failures = 0
		entry.nextCheck = next
		return
	}

	entry.failures++
	// A random delay, so that processes that fail together do not retry together.
	maxDelay := min(100*time.Millisecond<<min(entry.failures, 10), maxRetryDelay)
	entry.nextCheck = now.Add(rand.N(maxDelay))

	if ctx.Err() == nil {
		c.parts.Log.WarnContext(ctx, "updating a cron entry fails; retrying",
			"entry", entry.Name, "collection", c.parts.Collection.Name(), "attempt", entry.failures, "error", err)
	}
}

// serverTime returns the current time of the primary. It takes at most 10 s.
func (c *Cron) serverTime(ctx context.Context) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()

	var response struct {
		LocalTime time.Time `bson:"localTime"`
	}

	hello := bson.D{{Key: "hello", Value: 1}}
	err := c.parts.Collection.Database().Client().Database("admin").
		RunCommand(ctx, hello, options.RunCmd().SetReadPreference(readpref.Primary())).Decode(&response)
	return response.LocalTime, err
}
