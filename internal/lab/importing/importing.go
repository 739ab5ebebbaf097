package importing

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
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// Options describe an import.
type Options struct {
	From       string // one of Sources
	Database   string // of the rows; "" is the database of the outbox
	Collection string // of the messages, if it does not have its default name
	To         string // the outbox, as database.collection; "" is the only watched collection
	KeyHeader  string // the header whose value is the key of the record; "" is none
	MaxRetries int32  // after which outbox-event-bus gives an event up; 0 is its default, 5
	Actor      string
	OnProgress func(rows int64) // called after each batch; may be nil
}

// maxProblems bounds Report.Problems.
const maxProblems = 100

// Report counts the rows of an import, or of a plan.
type Report struct {
	From      string    `json:"from"`
	To        string    `json:"to"`
	Tables    []Table   `json:"tables"`
	Pending   int64     `json:"pending"`   // envelopes for the stream
	Scheduled int64     `json:"scheduled"` // envelopes with a due time
	Retried   int64     `json:"retried"`   // envelopes that wait for their next attempt
	Dead      int64     `json:"dead"`      // dead letters
	Known     int64     `json:"known"`     // rows that an earlier run has imported
	Rejected  int64     `json:"rejected"`  // rows that cannot be converted; they stay
	Problems  []Problem `json:"problems"`  // the first of the rejected rows
	DryRun    bool      `json:"dry_run"`
	Done      bool      `json:"done"`
}

// Table counts the rows of one collection.
type Table struct {
	Collection string `json:"collection"`
	Rows       int64  `json:"rows"` // that are to be imported
}

// Problem is a row that cannot be converted.
type Problem struct {
	Collection string `json:"collection"`
	ID         string `json:"id"`
	Reason     string `json:"reason"`
}

// Total returns the number of rows that become envelopes or dead letters.
func (r Report) Total() int64 { return r.Pending + r.Scheduled + r.Retried + r.Dead }

// ErrRejected matches each rejection of an import. Nothing was written.
var ErrRejected = errors.New("nothing was imported")

func rejectionf(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrRejected, fmt.Errorf(format, args...))
}

// Importer imports rows for the configured watcher.
type Importer struct {
	cfg     config.Config
	options Options
	source  source
	client  *mongo.Client
	state   state.Database
	rows    *mongo.Database
	outbox  *mongo.Collection
}

// Connect returns an Importer. The caller must call the function to disconnect.
func Connect(cfg config.Config, options Options) (*Importer, func(), error) {
	at := slices.IndexFunc(sources, func(source source) bool { return source.name == options.From })
	if at < 0 {
		return nil, nil, rejectionf("--from %q: expected one of %s", options.From, strings.Join(Sources(), ", "))
	}
	scope, err := changes.ParseScope(cfg.Watch, cfg.State.Pattern())
	if err != nil {
		return nil, nil, fmt.Errorf("watch: %w", err)
	}
	// With one watched collection, its name is no question.
	if options.To == "" {
		if scope.Kind() != changes.Collection {
			return nil, nil, rejectionf("the watcher reads %s; name the outbox with --to database.collection", scope)
		}
		options.To = scope.String()
	}
	db, coll, _ := strings.Cut(options.To, ".")
	// The watcher would never deliver an envelope of a collection that it does not read.
	if !scope.Matches([]byte(db), []byte(coll)) {
		return nil, nil, rejectionf("--to %s: the watcher reads %s", options.To, scope)
	}
	// The watcher would look for the parts of an imported envelope in other fields.
	if mapping := cfg.DocumentMapping(); mapping != nil {
		return nil, nil, rejectionf("watcher %s reads documents with other fields (%s), and imported rows become envelopes with the fields of "+
			"docs/envelope.md; import them with a watcher that has no mapping", cfg.Watcher, mapping)
	}
	if options.MaxRetries <= 0 {
		options.MaxRetries = 5
	}

	clients, err := connect.NewClients(cfg.MongoDB, connect.MongoHost{}, cfg.Node, 1, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		return nil, nil, err
	}
	im := &Importer{cfg: cfg, options: options, source: sources[at], client: clients.State, state: state.Open(clients.State, cfg.State)}
	im.outbox = mongodb.Majority(im.client.Database(db).Collection(coll))
	im.rows = im.client.Database(cmp.Or(options.Database, db))
	return im, func() { clients.Disconnect(context.Background()) }, nil
}

func (im *Importer) tableName(i int) string {
	if i == 0 && im.options.Collection != "" {
		return im.options.Collection
	}
	return im.source.tables[i].name
}

// Plan converts and counts all rows, and writes nothing. If the source cannot be imported, the error matches [ErrRejected].
func (im *Importer) Plan(ctx context.Context) (Report, error) {
	report := im.newReport()
	report.DryRun = true
	if err := im.checkSource(ctx, &report); err != nil {
		return report, err
	}
	run, err := im.newRun(ctx, &report, onlyCount)
	if err == nil {
		err = run.importTables(ctx)
	}
	return report, err
}

// Run imports the rows. It makes the checks of [Importer.Plan] that need no conversion again. If it fails, the same call imports the rest.
func (im *Importer) Run(ctx context.Context) (Report, error) {
	report := im.newReport()
	if err := im.checkSource(ctx, &report); err != nil {
		return report, err
	}
	run, err := im.newRun(ctx, &report, writeRows)
	if err == nil {
		err = run.importTables(ctx)
	}
	report.Done = err == nil

	// An interrupted import has imported a part, so it is logged too.
	log := nodes.NewAuditLog(im.state.Collection("audit"), im.cfg.Watcher, "")
	logErr := log.Append(context.WithoutCancel(ctx), "rows_imported", bson.D{
		{Key: "from", Value: report.From},
		{Key: "to", Value: report.To},
		{Key: "rows", Value: report.Total()},
		{Key: "rejected", Value: report.Rejected},
		{Key: "complete", Value: err == nil},
		{Key: "actor", Value: im.options.Actor},
	})
	if logErr != nil {
		logErr = fmt.Errorf("not written to the audit log: %w", logErr)
	}
	return report, errors.Join(err, logErr)
}

func (im *Importer) newReport() Report {
	return Report{From: im.options.From, To: im.options.To, Tables: []Table{}, Problems: []Problem{}}
}

// checkSource rejects collections that are missing, that have rows of another form, or on which a publisher works.
func (im *Importer) checkSource(ctx context.Context, report *Report) error {
	// Locks end by the time of the server.
	now, err := mongodb.ServerTime(ctx, im.client)
	if err != nil {
		return err
	}
	var empty []string
	for i, t := range im.source.tables {
		coll := im.rows.Collection(im.tableName(i))
		any, err := mongodb.Exists(ctx, coll, bson.D{})
		if err != nil {
			return err
		}
		if !any {
			empty = append(empty, mongodb.Namespace(coll))
		}
		// A library may delete its messages once they are sent, so one empty collection is usual. But a name that a user has
		// written may be wrong, and a database without any row is another one.
		if len(empty) == len(im.source.tables) || !any && coll.Name() == im.options.Collection {
			return rejectionf("%s has no rows; expected the messages of %s. Name their place with --database and --collection",
				strings.Join(empty, ", "), im.source.name)
		}
		if err := im.checkFields(ctx, coll, t); err != nil {
			return err
		}
		if err := im.checkStatus(ctx, coll, t); err != nil {
			return err
		}

		if err := im.checkLocks(ctx, coll, t, now); err != nil {
			return err
		}
		n, err := coll.CountDocuments(ctx, t.pending(im.options))
		if err != nil {
			return mongodb.DescribeError(err, "reading "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
		}
		report.Tables = append(report.Tables, Table{mongodb.Namespace(coll), n})
	}
	return nil
}

// checkFields rejects a collection with a row that lacks a field of the source.
func (im *Importer) checkFields(ctx context.Context, coll *mongo.Collection, table table) error {
	var lacks bson.A
	for _, name := range table.required {
		lacks = append(lacks, everySpelling(name, bson.D{{Key: "$exists", Value: false}}))
	}

	// One row without the field is enough: rows of one library have one form.
	raw, err := findRow(ctx, coll, bson.D{{Key: "$or", Value: lacks}})
	if err != nil || raw == nil {
		return err
	}
	elems, err := raw.Elements()
	if err != nil {
		return err
	}
	names := make([]string, len(elems))
	for i, e := range elems {
		names[i] = e.Key()
	}
	return rejectionf("%s does not belong to %s: expected the fields %s; found a row with %s",
		mongodb.Namespace(coll), im.source.name, strings.Join(table.required, ", "), strings.Join(names, ", "))
}

// findRow returns a row that matches, or nil if there is none.
func findRow(ctx context.Context, coll *mongo.Collection, filter bson.D) (bson.Raw, error) {
	raw, err := coll.FindOne(ctx, filter).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil, nil
	}
	return raw, mongodb.DescribeError(err, "reading "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
}

// checkStatus rejects a collection with a row whose status the source does not have.
func (im *Importer) checkStatus(ctx context.Context, coll *mongo.Collection, table table) error {
	if table.status == nil {
		return nil
	}

	name := table.status.field
	// The server looks for an unknown status, so no row is transferred if all are valid.
	raw, err := findRow(ctx, coll, everySpelling(name, bson.D{{Key: "$nin", Value: table.status.listKnown()}}))
	if err != nil || raw == nil {
		return err
	}
	return rejectionf("%s: expected the %s %s; found %s in the row %s. Such a row would be left out",
		mongodb.Namespace(coll), name, strings.Join(table.status.listKnown(), ", "), row{raw}.field(name), raw.Lookup("_id"))
}

// checkLocks rejects rows that a running publisher works on: it would send them as well.
func (im *Importer) checkLocks(ctx context.Context, coll *mongo.Collection, table table, now time.Time) error {
	if table.lock == nil {
		return nil
	}

	// Payloads may be large; a lock needs a few fields.
	fields := bson.D{}
	for _, name := range table.lock.fields {
		for _, n := range listSpellings(name) {
			fields = append(fields, bson.E{Key: n, Value: 1})
		}
	}
	locked := 0
	err := mongodb.FindEach(ctx, coll, "reading the locks of "+mongodb.Namespace(coll), table.lock.rows, func(raw bson.Raw) error {
		until, err := table.lock.until(row{raw})
		if err != nil {
			return rejectionf("%s, row %s: %w", mongodb.Namespace(coll), raw.Lookup("_id"), err)
		}
		if until.After(now) {
			locked++
		}
		return nil
	}, options.Find().SetProjection(fields))
	if err == nil && locked > 0 {
		err = rejectionf("a publisher works on %d rows of %s; stop it, and wait until its locks have ended", locked, mongodb.Namespace(coll))
	}
	return err
}

// everySpelling returns the condition that holds for each spelling of a field.
func everySpelling(name string, condition bson.D) bson.D {
	all := bson.D{}
	for _, n := range listSpellings(name) {
		all = append(all, bson.E{Key: n, Value: condition})
	}
	return all
}

// effect is whether a run writes the envelopes, or only counts them.
type effect bool

const (
	onlyCount effect = false
	writeRows effect = true
)

// newRun starts a run at the time of the server.
func (im *Importer) newRun(ctx context.Context, report *Report, effect effect) (*importRun, error) {
	run := &importRun{Importer: im, report: report, effect: effect, marks: mongodb.Majority(im.state.Collection("imports"))}
	var err error
	if effect == writeRows {
		err = im.state.Ensure(ctx, slog.New(slog.DiscardHandler))
	} else {
		err = im.state.Check(ctx)
	}
	if err != nil {
		return nil, err
	}
	if run.now, err = mongodb.ServerTime(ctx, im.client); err != nil {
		return nil, err
	}
	run.at, err = mongodb.ClusterTime(ctx, im.client)
	return run, err
}

// findRows opens a cursor over the rows of a table, in the order in which the library sends.
func (im *Importer) findRows(ctx context.Context, coll *mongo.Collection, table table) (*mongo.Cursor, error) {
	opts := options.Find().SetSort(table.sort).SetAllowDiskUse(true).SetBatchSize(batchRows)
	cur, err := mongodb.Majority(coll).Find(ctx, table.pending(im.options), opts)
	return cur, mongodb.DescribeError(err, "reading "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
}
