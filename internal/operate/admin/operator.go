package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/figures"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/resume"
)

// Effect is whether an action takes place, or is a dry run, which only counts.
type Effect bool

// The effects.
const (
	DryRun  Effect = true
	ForReal Effect = false
)

// Operator acts on one watcher. Its methods and its subjects offer everything that an
// operator can see and do. They are safe for concurrent use.
//
// State and Watcher are required. If another function is nil, the use-cases that need it return
// [ErrUnavailable]. The fields must not change after the first use.
//
// Lists have at most [MaxPage] entries, and [DefaultPage] by default. Each page has the cursor of
// the next one. A cursor remains valid while entries are added and removed. Actions are written to
// the audit log with their actor. Destructive actions reject a filter without conditions unless
// All is set. With DryRun they only count.
type Operator struct {
	State   state.Database
	Watcher string
	Actor   string
	Source  string // where the action was requested: cli, api or page; "" is not logged
	Slots   int    // of the watcher in the configuration; 0 means one
	Slot    string // restricts actions on the lease to one slot, such as "0of2"; "" means all slots (N28)

	// Outboxes lists the collections that the configured watcher reads by its configuration, also if
	// ForWatcher selects another watcher. Without it, or for another watcher, the registry supplies
	// the collections that the watcher has read so far.
	Outboxes func(ctx context.Context) ([]outboxes.Outbox, error)
	// Inspect returns what hides events of the watched names of the configuration, or may lose them.
	Inspect func(ctx context.Context, rights connect.RightsCheck) ([]outboxes.Finding, error)
	// NextInsert returns the event that follows the position of a slot, without its document.
	NextInsert    func(ctx context.Context, of slot.Range, at resume.Position) (changes.Skip, error)
	LetterArchive time.Duration // how long discarded dead letters stay in the archive; 0 removes them at once
	LetterExpiry  time.Duration // after which the server removes the dead letter of a skipped event; 0 keeps it
	Node, Version string        // of this process

	Mapping   *envelope.Mapping                                            // of Watcher; nil: the documents are envelopes of the contract
	Router    *routing.Router                                              // of Watcher, for replays and requeues
	Compacted func(ctx context.Context, topics []string) ([]string, error) // returns the compacted topics, for replays
	Oplog     func(ctx context.Context) (problems.Oplog, error)            // reads the ends of the oplog

	CheckKafka func(ctx context.Context) error // logs in to Kafka, for Ping
	// KafkaGroups reads consumer groups from Kafka.
	KafkaGroups func(ctx context.Context, query connect.GroupQuery) (connect.Groups, error)

	// NewTopic creates a topic in Kafka, and TopicCommand returns the command of kafka-topics.sh that repairs one.
	NewTopic     func(ctx context.Context, order TopicOrder) (connect.NewTopic, error)
	TopicCommand func(topic, kind string, partitions int) string

	HandlerLetters    []string // names of the collections with dead letters of handlers
	ConsumerDatabases []string // of services, also without an outbox of the configured watcher

	Redact Redaction
	Log    *slog.Logger // nil disables logging

	configured string // the watcher of the configuration, if ForWatcher selected another one
	counts     *countDesk
	replays    *replayRunner
}

// New returns operator with a queue of replays and one place that counts, which all operators share that For and ForWatcher derive
// from it. An Operator without them counts for each request, and does not run replays in the background.
func New(operator Operator) Operator {
	operator.counts = &countDesk{}
	operator.replays = newReplayRunner()
	return operator
}

// Actor is the person or program that acts. Name and Source are written to the audit log with each
// action.
type Actor struct {
	Name   string
	Source string // cli, api or page
}

// ErrUnavailable is returned by a use-case that needs a function which this process does not have.
var ErrUnavailable = errors.New("this process was started without the component for this action")

// For returns the operator for another actor. It costs nothing.
func (o Operator) For(actor Actor) Operator {
	o.Actor = actor.Name
	o.Source = actor.Source
	return o
}

// ForWatcher returns the operator for another watcher of the same state database. "" means the same
// watcher.
func (o Operator) ForWatcher(watcher string) Operator {
	if watcher != "" && watcher != o.Watcher {
		o.configured = cmp.Or(o.configured, o.Watcher)
		o.Watcher = watcher
	}
	return o
}

// ForSlot returns the operator with actions on the lease restricted to one slot of the watcher, such
// as 0of2. "" means all slots (N28).
func (o Operator) ForSlot(slot string) Operator {
	o.Slot = slot
	return o
}

// isConfigured reports whether the watcher is that of the configuration.
func (o Operator) isConfigured() bool { return o.configured == "" || o.configured == o.Watcher }

// Lease returns the lease of the watcher, or of one slot: pause, pin, step down.
func (o Operator) Lease() Lease { return Lease{o} }

// Recovery returns the ways to continue a watcher whose position is lost or doubtful.
func (o Operator) Recovery() Recovery { return Recovery{o} }

// Nodes returns the processes that use the state database.
func (o Operator) Nodes() Nodes { return Nodes{o} }

// Letters returns the dead letters of the watcher.
func (o Operator) Letters() Letters { return Letters{o} }

// Waiting returns the waiting envelopes of the watcher.
func (o Operator) Waiting() Waiting { return Waiting{o} }

// Schedule returns the scheduled envelopes of the watcher.
func (o Operator) Schedule() Schedule { return Schedule{o} }

// Replays returns the replays of the watcher.
func (o Operator) Replays() Replays {
	o.replays = cmp.Or(o.replays, newReplayRunner())
	return Replays{o, newReplayStore(o.State)}
}

// HandlerWaiting returns the messages that handlers of consumers retry, in the databases of services.
func (o Operator) HandlerWaiting() HandlerWaiting { return HandlerWaiting{o} }

// Groups returns the consumer groups that read the topics of the watcher.
func (o Operator) Groups() Groups { return Groups{o} }

// Inboxes returns the inboxes of services.
func (o Operator) Inboxes() Inboxes { return Inboxes{o} }

// Sagas returns the sagas of services.
func (o Operator) Sagas() Sagas { return Sagas{o} }

// Watchers returns the watchers of the state database.
func (o Operator) Watchers() Watchers { return Watchers{o} }

// Run runs the replays that were started by operators of this process. It blocks until ctx ends. o must come from [New]. If Run is not
// running, replays are ordered but not run. A second call at the same time returns an error.
func (o Operator) Run(ctx context.Context) error {
	log := o.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return o.replays.runJobs(ctx, log)
}

// letters returns the collection of the dead letters of the relay, of all watchers.
func (o Operator) letters() *mongo.Collection { return o.State.Collection("letters") }

// waiting returns the collection of the waiting envelopes of all watchers.
func (o Operator) waiting() *mongo.Collection { return o.State.Collection("waiting") }

func (o Operator) watcherDocuments() *mongo.Collection { return o.State.Collection("watchers") }

func (o Operator) database(name string) *mongo.Database { return o.State.Client().Database(name) }

// listRegistrations returns the watcher's registrations, sorted by the name of the collection. A
// collection that was dropped and created again has several.
func (o Operator) listRegistrations(ctx context.Context) ([]outboxes.Registration, error) {
	return outboxes.NewRegistry(o.State.Collection("collections")).Registrations(ctx, o.Watcher)
}

// collectionNames returns the sorted names of the outboxes that the watcher is registered for.
func (o Operator) collectionNames(ctx context.Context) ([]string, error) {
	return outboxes.NewRegistry(o.State.Collection("collections")).Names(ctx, o.Watcher)
}

// ErrNoCollections is returned for a watcher that has not registered any collection.
var ErrNoCollections = errors.New("it has read no collection yet")

// errNoCollections returns [ErrNoCollections] with the possible causes for the watcher of operator.
func errNoCollections(operator Operator) error {
	return fmt.Errorf("watcher %s in %s: %w: run outrelay and append the first event, or correct the names of the watcher and of "+
		"the state database", operator.Watcher, operator.State.Name(), ErrNoCollections)
}

// Collections returns the sorted names of the outboxes that the watcher is registered for, each once,
// or only the named one.
func (o Operator) Collections(ctx context.Context, only string) ([]string, error) {
	all, err := o.collectionNames(ctx)
	if err != nil {
		return nil, err
	}

	switch {
	case len(all) == 0:
		return nil, errNoCollections(o)
	case only == "":
		return all, nil
	case !slices.Contains(all, only):
		return nil, fmt.Errorf("watcher %s does not read %s; its collections are %s",
			o.Watcher, only, strings.Join(all, ", "))
	}
	return []string{only}, nil
}

// checkCollection returns an error if only names an outbox that the watcher does not read and of which nothing waits: a dropped
// collection leaves the registry, and its envelopes may still wait.
func (o Operator) checkCollection(ctx context.Context, only string) error {
	if only == "" {
		return nil
	}
	_, err := o.Collections(ctx, only)
	if err == nil {
		return nil
	}
	of := bson.D{{Key: "watcher", Value: o.Watcher}, {Key: "ns", Value: only}}
	if found, existsErr := mongodb.Exists(ctx, mongodb.Majority(o.waiting()), of); existsErr != nil || found {
		return existsErr
	}
	return err
}

// lookupCollections is Collections, but returns an empty list for a watcher that has none.
func (o Operator) lookupCollections(ctx context.Context, only string) ([]string, error) {
	if only == "" {
		return o.collectionNames(ctx)
	}
	return o.Collections(ctx, only)
}

// scheduledCollections returns the outboxes that may hold scheduled envelopes, or only the named one.
func (o Operator) scheduledCollections(ctx context.Context, only string) ([]string, error) {
	if only != "" {
		return []string{only}, o.checkCollection(ctx, only)
	}
	all, err := o.collectionNames(ctx)
	if err != nil {
		return nil, err
	}
	return figures.ListScheduled(ctx, o.State, o.Watcher, all)
}

// logAction writes an action to the audit log, after it was done. If that fails, the error states
// that the action was done.
func (o Operator) logAction(ctx context.Context, kind nodes.Kind, fields bson.D) error {
	fields = append(fields, bson.E{Key: "actor", Value: o.Actor})
	if o.Slot != "" {
		fields = append(fields, bson.E{Key: "slot", Value: o.Slot})
	}
	if o.Source != "" {
		fields = append(fields, bson.E{Key: "source", Value: o.Source})
	}

	if err := nodes.NewAuditLog(o.State.Collection("audit"), o.Watcher, "").Append(ctx, kind, fields); err != nil {
		return fmt.Errorf("done, but not written to the audit log: %w", err)
	}
	// If this fails, the counts are those from before the action for some seconds.
	_ = figures.NoteAction(ctx, o.State, o.Watcher)
	return nil
}

// logShown logs that a payload is shown. The caller must show nothing if it fails: a payload that was shown without a record cannot be
// taken back.
func logShown(ctx context.Context, operator Operator, fields bson.D) error {
	if err := operator.logAction(ctx, "payload_shown", fields); err != nil {
		return fmt.Errorf("the payload is not shown, because the audit log cannot be written: %w", err)
	}
	return nil
}

// maxAuditWait bounds writing the entry of an action after its context has ended.
const maxAuditWait = 5 * time.Second

// logOutcome logs an action whose result is actionErr, even if the action's context has ended. It
// returns actionErr joined with its own error. While the action's context lasts, logOutcome has no
// own time limit, so that a slow server does not cause a missing entry.
func (o Operator) logOutcome(actionCtx context.Context, kind nodes.Kind, fields bson.D, actionErr error) error {
	ctx, cancel := context.WithCancel(context.WithoutCancel(actionCtx))
	defer cancel()
	stop := context.AfterFunc(actionCtx, func() { time.AfterFunc(maxAuditWait, cancel) })
	defer stop()

	fields = append(fields, bson.E{Key: "complete", Value: actionErr == nil})
	return errors.Join(actionErr, o.logAction(ctx, kind, fields))
}
