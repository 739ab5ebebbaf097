package adopt

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/offline"
	"github.com/outrelay/outrelay/internal/relay/stored/divisions"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/resume"
)

// Source selects the position to adopt. Exactly one of File, Topic, Token and At is set.
type Source struct {
	File      string    // offset file of Kafka Connect in standalone mode
	Topic     string    // offset topic of Kafka Connect in distributed mode
	Connector string    // in File or Topic; "" selects the only connector for MongoDB
	Token     string    // see parseToken
	At        time.Time // the first event to deliver

	// StoppedAt is when the other publisher was stopped. It cannot have sent later events, so they cannot be repeated. Zero means now.
	StoppedAt time.Time
	Replace   bool // also if the watcher has a position
}

// The ways in which a token was compared with the cluster.
const (
	CheckedByEvent = "event" // the oplog has the event of the token
	checkedByTime  = "time"  // the oplog has the time; a position between two events has no other identity
)

// Report is the result of [Plan] and of `outrelay adopt --json`.
type Report struct {
	Watcher   string    `json:"watcher"`
	Source    string    `json:"source"` // file, topic, token or time
	Kind      string    `json:"kind,omitempty"`
	Connector string    `json:"connector,omitempty"`
	Partition string    `json:"partition,omitempty"` // the source as the connector names it
	At        time.Time `json:"at"`                  // cluster time of the position
	Token     string    `json:"token,omitempty"`
	Checked   string    `json:"checked"` // CheckedByEvent or checkedByTime
	OplogFrom time.Time `json:"oplog_from,omitzero"`
	Present   time.Time `json:"present,omitzero"` // position of the watcher so far
	// MaxRepeats counts the inserts into the watched collections after the position and up to StoppedAt. The other publisher may
	// have sent any of them.
	MaxRepeats int64 `json:"max_repeats"`
	// Later counts the inserts after StoppedAt, which are not repeated.
	Later  int64 `json:"later"`
	DryRun bool  `json:"dry_run"`
	Done   bool  `json:"done"`

	position   resume.Position
	docs       []lease.Vacant
	replicaSet string
}

// Adopter adopts positions for the configured watcher.
type Adopter struct {
	cfg     config.Config
	log     *slog.Logger
	clients *connect.Clients
	scope   *changes.Scope
}

// Connect returns an Adopter. The caller must call the function to disconnect.
func Connect(cfg config.Config, log *slog.Logger) (*Adopter, func(), error) {
	scope, err := changes.ParseScope(cfg.Watch, cfg.State.Pattern())
	if err != nil {
		return nil, nil, fmt.Errorf("watch: %w", err)
	}
	clients, err := connect.NewClients(cfg.MongoDB, connect.MongoHost{}, cfg.Node, 1, log, nil)
	if err != nil {
		return nil, nil, err
	}
	return &Adopter{cfg: cfg, log: log, clients: clients, scope: scope}, func() { clients.Disconnect(context.Background()) }, nil
}

// Plan finds the position, checks it, and counts the possible repeats. It writes nothing. If the position cannot be adopted, the error
// matches [ErrRejected]. It reads the change stream from the position on, at some ten thousand events a second.
func (a *Adopter) Plan(ctx context.Context, src Source) (Report, error) {
	report := Report{Watcher: a.cfg.Watcher, DryRun: true}
	if err := state.Open(a.clients.State, a.cfg.State).Check(ctx); err != nil {
		return report, err
	}
	// Checks that cost nothing come first: counting repeats reads the whole stream from the position on.
	if err := a.checkUnowned(ctx, src, &report); err != nil {
		return report, err
	}
	if err := a.findPosition(ctx, src, &report); err != nil {
		return report, err
	}
	report.At, report.Token = asTime(report.position.ClusterTime), report.position.Token.Data()

	now, err := mongodb.ClusterTime(ctx, a.clients.State)
	if err != nil {
		return report, err
	}
	if err := a.checkHistory(ctx, now, &report); err != nil {
		return report, err
	}
	if err := a.checkCluster(ctx, &report); err != nil {
		return report, err
	}
	return report, a.countRepeats(ctx, src, now, &report)
}

func asTime(timestamp bson.Timestamp) time.Time { return time.Unix(int64(timestamp.T), 0).UTC() }

// checkUnowned reads the documents of the watcher. It rejects while a node works for the watcher.
func (a *Adopter) checkUnowned(ctx context.Context, src Source, report *Report) error {
	state := state.Open(a.clients.State, a.cfg.State)
	var want []string
	for _, p := range slot.Ranges(a.cfg.Slots) {
		want = append(want, p.ID(a.cfg.Watcher))
	}
	has, err := divisions.New(state).IDs(ctx, a.cfg.Watcher)
	if err != nil {
		return err
	}
	// Documents of another number of slots would keep their own positions.
	for _, id := range has {
		if !slices.Contains(want, id) {
			return rejectionf("watcher %s has the documents %s, and is configured for %d slots; set slots to their number",
				a.cfg.Watcher, strings.Join(has, ", "), max(a.cfg.Slots, 1))
		}
	}

	report.docs = nil
	if report.replicaSet, err = lease.ReplicaSetID(ctx, a.clients.State); err != nil {
		return err
	}
	for _, id := range want {
		document, now, err := lease.Read(ctx, state.Collection("watchers"), id)
		missing := errors.Is(err, lease.ErrNotFound)
		switch {
		// A watcher that has never run gets its documents with the position.
		case missing:
		case err != nil:
			return err
		case document.Owner != "" && document.ExpiresAt.After(now):
			return rejectionf("node %s owns %s; stop outrelay on all nodes first", document.Node, id)
		// The transactional ids of the copy may be in use on the other replica set.
		case document.CheckHome(report.replicaSet) != nil:
			return rejectionf("%s: %w", id, document.CheckHome(report.replicaSet))
		case document.Gap != nil:
			return rejectionf("%s sweeps a gap of its stream; let it finish first", id)
		case !document.Position().IsZero() && !src.Replace:
			at, _ := document.Position().Time()
			return rejectionf("%s has a position already (%s); pass --replace to replace it", id, asTime(at).Format(time.RFC3339))
		}
		if at, ok := document.Position().Time(); ok {
			report.Present = asTime(at)
		}
		report.docs = append(report.docs, lease.Vacant{ID: id, Exists: !missing, Epoch: document.Epoch})
	}
	return nil
}

// findPosition reads the position from its source.
func (a *Adopter) findPosition(ctx context.Context, src Source, report *Report) error {
	var list []rawOffset
	var err error
	switch {
	case src.Token != "":
		report.Source = "token"
		if report.position, err = parseToken(src.Token); err != nil {
			return rejectionf("%w", err)
		}
		return nil
	case !src.At.IsZero():
		report.Source = "time"
		report.position = resume.Position{ClusterTime: bson.Timestamp{T: uint32(max(src.At.Unix(), 1)), I: 1}}
		return nil
	case src.File != "":
		report.Source = "file"
		list, err = readOffsetFile(src.File)
	default:
		report.Source = "topic"
		wire, connectErr := connect.NewKafka(a.cfg, connect.KafkaHost{}, a.log, nil)
		if connectErr != nil {
			return connectErr
		}
		defer wire.Close()
		list, err = readOffsetTopic(ctx, wire, src.Topic)
	}
	if err != nil {
		return rejectionf("%w", err)
	}

	// A topic may contain the offsets of many connectors.
	offset, err := selectOffset(list, src.Connector)
	if err != nil {
		return err
	}
	report.Kind, report.Connector, report.Partition, report.position = offset.Kind, offset.Connector, offset.Partition, offset.Position
	return a.checkNamespace(offset)
}

// checkNamespace rejects the offset of a connector that reads another collection. Only the MongoDB Kafka connector names it.
func (a *Adopter) checkNamespace(offset connectorOffset) error {
	_, rest, isURI := strings.Cut(offset.Partition, "://")
	_, ns, hasPath := strings.Cut(rest, "/")
	db, coll, hasColl := strings.Cut(ns, ".")
	if offset.Kind != mongoKafka || !isURI || !hasPath || !hasColl || a.scope.Matches([]byte(db), []byte(coll)) {
		return nil
	}
	return rejectionf("connector %s reads %s, and watcher %s reads %s", offset.Connector, ns, a.cfg.Watcher, a.scope)
}

// checkHistory rejects a position whose time the oplog does not have.
func (a *Adopter) checkHistory(ctx context.Context, now bson.Timestamp, report *Report) error {
	at := report.position.ClusterTime
	if at.After(now) {
		return rejectionf("the position is of %s, and the time of the cluster is %s: it belongs to another cluster, or the time is wrong",
			asTime(at).Format(time.RFC3339), asTime(now).Format(time.RFC3339))
	}

	oplog, err := changes.ReadOplog(ctx, a.clients.State)
	// Without the privilege, opening the stream shows it.
	if errors.Is(err, changes.ErrNotAllowed) {
		return nil
	}
	if err != nil {
		return err
	}
	report.OplogFrom = asTime(oplog.Oldest)
	if at.Before(oplog.Oldest) {
		return a.tooOld(at, asTime(oplog.Oldest).Format(time.RFC3339))
	}
	return nil
}

func (a *Adopter) tooOld(position bson.Timestamp, oldest string) error {
	from := asTime(position).Format(time.RFC3339)
	return rejectionf("the position is of %s, and the oplog begins at %s. If the outbox still has the documents of that time, "+
		"run `outrelay recover --from %s` and start outrelay: it delivers them from the collection, marked as redelivered. "+
		"Otherwise adopt a later time with --at", from, oldest, from)
}

// checkCluster compares the token with the oplog. The server accepts the token of another cluster, and would be silent until the next
// event. So checkCluster looks for the event itself.
func (a *Adopter) checkCluster(ctx context.Context, report *Report) error {
	report.Checked = checkedByTime
	if !isEventToken(report.position.Token) {
		return nil
	}

	// The watcher's own stream comes first, because reading the changes of other collections needs a further
	// privilege.
	for _, wide := range []bool{false, true} {
		found, err := a.hasEvent(ctx, report.position, wide)
		if wide && mongodb.HasCode(err, mongodb.CodeUnauthorized) {
			return rejectionf("the watched collections (%s) have no event with the token %s, and the user may not read the changes of "+
				"other collections; grant changeStream on the cluster, or adopt the time with --at %s",
				a.scope, report.position.Token, report.At.Format(time.RFC3339))
		}
		if isLostHistory(err) {
			return a.tooOld(report.position.ClusterTime, "a later time")
		}
		if err != nil {
			return fmt.Errorf("looking for the event of the token: %w", err)
		}
		if found {
			report.Checked = CheckedByEvent
			return nil
		}
	}
	return rejectionf("expected an event with the token at %s in the oplog of this cluster; found none: the token %s belongs to another "+
		"cluster, or to one that was restored since", report.At.Format(time.RFC3339), report.position.Token)
}

// isEventToken reports whether the token belongs to an event. Otherwise it is a position between events, which has only a time. After the
// time of 18 characters follow a version and the type: 0 for a position, and 128 for an event.
func isEventToken(token resume.Token) bool {
	const versionEnd = 18 + 4
	data := token.Data()
	return len(data) > versionEnd && data[versionEnd:versionEnd+2] != "29"
}

// hasEvent reports whether a stream contains the event of the position: that of the watcher, or one over the cluster.
func (a *Adopter) hasEvent(ctx context.Context, position resume.Position, wide bool) (bool, error) {
	client := a.clients.Stream
	at := position.ClusterTime
	// Only the events of this time are transferred. Their tokens are compared below.
	pipeline := mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "clusterTime", Value: at}}}},
		{{Key: "$project", Value: bson.D{{Key: "clusterTime", Value: 1}}}},
	}
	opts := options.ChangeStream().SetStartAtOperationTime(&at).SetMaxAwaitTime(time.Second).SetShowExpandedEvents(true)

	var cs *mongo.ChangeStream
	var err error
	if wide {
		cs, err = client.Watch(ctx, pipeline, opts)
	} else {
		cs, err = a.scope.Watch(ctx, client, nil, pipeline, opts)
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = cs.Close(context.WithoutCancel(ctx)) }()

	for ctx.Err() == nil {
		if cs.TryNext(ctx) {
			// After the last event of a response, the driver returns the position after the response instead of the event's token.
			if token, ok := cs.Current.Lookup("_id").DocumentOK(); ok && resume.Token(token).Data() == position.Token.Data() {
				return true, nil
			}
			continue
		}
		if cs.Err() != nil {
			return false, cs.Err()
		}
		// The stream is past the time of the event, so it does not contain the event.
		if reached, ok := resume.Token(cs.ResumeToken()).ClusterTime(); ok && reached.After(at) {
			return false, nil
		}
	}
	return false, context.Cause(ctx)
}

// codeHistoryLost is the server's code for a time that the oplog does not have any more.
const codeHistoryLost = 286

func isLostHistory(err error) bool {
	gap, ok := errors.AsType[*changes.GapError](err)
	return ok && gap != nil || mongodb.HasCode(err, codeHistoryLost)
}

// countRepeats reads the inserts after the position up to now, through the stream that the relay will open.
func (a *Adopter) countRepeats(ctx context.Context, src Source, now bson.Timestamp, report *Report) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	batches, failed := make(chan *changes.Batch), make(chan error, 1)
	// The stream starts as the relay will start it after the hand-over.
	start := changes.Start{Position: report.position, PipelineHash: lease.AdoptedHash}
	go func() { failed <- offline.ReadChanges(ctx, a.clients.Stream, a.scope, start, batches) }()

	for {
		select {
		case batch := <-batches:
			a.countBatch(batch, src.StoppedAt, now, report)
			reached, _ := batch.Position.Time()
			batch.Release()
			if reached.Before(now) {
				continue
			}
			cancel()
			if err := <-failed; err != nil && !errors.Is(err, context.Canceled) {
				return fmt.Errorf("reading the change stream from the position: %w", err)
			}
			return nil
		case err := <-failed:
			if isLostHistory(err) {
				return a.tooOld(report.position.ClusterTime, "a later time")
			}
			return fmt.Errorf("reading the change stream from the position: %w", err)
		}
	}
}

func (a *Adopter) countBatch(batch *changes.Batch, stopped time.Time, now bson.Timestamp, report *Report) {
	var ev changes.Event
	for _, doc := range batch.Docs {
		if changes.Parse(doc, &ev) != nil || ev.Op != changes.Insert || ev.ClusterTime.After(now) {
			continue
		}
		// A cluster time has seconds: every event of the second of the stop may have been sent.
		if !stopped.IsZero() && int64(ev.ClusterTime.T) > stopped.Unix() {
			report.Later++
			continue
		}
		report.MaxRepeats++
	}
}

// Write stores the position of a report in the documents of the watcher. It returns an error if a node has owned the watcher since
// [Adopter.Plan]. All slots get the position, or none.
func (a *Adopter) Write(ctx context.Context, report Report, actor string) (Report, error) {
	state := state.Open(a.clients.State, a.cfg.State)
	if err := state.Ensure(ctx, a.log); err != nil {
		return report, err
	}
	if err := lease.AdoptPosition(ctx, state.Collection("watchers"), report.docs, report.position, report.replicaSet); err != nil {
		return report, err
	}
	report.DryRun, report.Done = false, true

	err := nodes.NewAuditLog(state.Collection("audit"), a.cfg.Watcher, "").Append(ctx, "position_adopted", bson.D{
		{Key: "source", Value: report.Source},
		{Key: "connector", Value: report.Connector},
		{Key: "at", Value: report.At},
		{Key: "max_repeats", Value: report.MaxRepeats},
		{Key: "actor", Value: actor},
	})
	// The position is stored already: an error alone would lead the operator to repeat the command.
	if err != nil {
		return report, fmt.Errorf("done, but not written to the audit log: %w", err)
	}
	return report, nil
}
