package importing

import (
	"context"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Bounds of a batch, which is at most one transaction of each kind.
const (
	batchRows  = 500
	batchBytes = 8 << 20
)

// importRun is one run over all tables.
type importRun struct {
	*Importer
	report *Report
	effect effect
	marks  *mongo.Collection
	now    time.Time      // of the server, at the start
	at     bson.Timestamp // cluster time at the start
	done   int64
}

// converted is a row of a batch.
type converted struct {
	rowID bson.RawValue
	mark  bson.D // its mark
	kind  kind
	item  *item
	doc   bson.D
}

func (r *importRun) importTables(ctx context.Context) error {
	for i, t := range r.source.tables {
		coll := r.rows.Collection(r.tableName(i))
		cur, err := r.findRows(ctx, coll, t)
		if err != nil {
			return err
		}

		var batch []bson.Raw
		size := 0
		flush := func() error {
			err := r.importBatch(ctx, coll, t, batch)
			r.done += int64(len(batch))
			batch, size = nil, 0
			if r.options.OnProgress != nil {
				r.options.OnProgress(r.done)
			}
			return err
		}
		err = mongodb.EachDocument(ctx, cur, "reading "+mongodb.Namespace(coll), func(raw bson.Raw) error {
			// The cursor reuses the memory of a document.
			batch = append(batch, append(bson.Raw(nil), raw...))
			if size += len(raw); len(batch) < batchRows && size < batchBytes {
				return nil
			}
			return flush()
		})
		if err == nil {
			// The last batch is smaller than the limits.
			err = flush()
		}
		if err != nil {
			return fmt.Errorf("importing %s: %w", mongodb.Namespace(coll), err)
		}
	}
	return nil
}

// importBatch imports the rows that have no mark.
func (r *importRun) importBatch(ctx context.Context, coll *mongo.Collection, table table, rows []bson.Raw) error {
	if len(rows) == 0 {
		return nil
	}
	marked, err := r.markedRows(ctx, coll, rows)
	if err != nil {
		return err
	}

	var list []converted
	for _, raw := range rows {
		id := raw.Lookup("_id")
		if marked[id.String()] {
			r.report.Known++
			continue
		}
		converted, err := r.convertRow(coll, table, raw)
		if err != nil {
			r.reject(mongodb.Namespace(coll), id, err)
			continue
		}
		list = append(list, converted)
	}
	// Checked after the conversion, because only the converted id is the id of an envelope.
	if list, err = r.withoutExisting(ctx, mongodb.Namespace(coll), list); err != nil {
		return err
	}

	// Without write, the same code counts for the plan.
	if r.effect == writeRows {
		if err := r.writeBatch(ctx, list); err != nil {
			return err
		}
	}
	for _, c := range list {
		switch c.kind {
		case pending:
			r.report.Pending++
		case scheduled:
			r.report.Scheduled++
		case retried:
			r.report.Retried++
		case dead:
			r.report.Dead++
		}
	}
	return nil
}

// reject reports a row that is not imported.
func (r *importRun) reject(ns string, id bson.RawValue, cause error) {
	r.report.Rejected++
	if len(r.report.Problems) < maxProblems {
		r.report.Problems = append(r.report.Problems, Problem{ns, id.String(), cause.Error()})
	}
}

func (r *importRun) convertRow(coll *mongo.Collection, table table, raw bson.Raw) (converted, error) {
	// Without its time, a row would be sent too early or too late.
	for _, name := range table.times {
		if _, err := (row{raw}).checkedTime(name); err != nil {
			return converted{}, err
		}
	}

	it, err := table.convert(row{raw}, r.options)
	if err != nil {
		return converted{}, err
	}

	rowID := raw.Lookup("_id")
	converted := converted{rowID: rowID, item: it, kind: it.kindAt(r.now), mark: markOf(coll, rowID)}
	converted.doc, err = it.envelope(r.source.name, rowID, converted.kind, r.options)
	return converted, err
}

// markOf returns the id of a row's mark.
func markOf(coll *mongo.Collection, id bson.RawValue) bson.D {
	return bson.D{{Key: "ns", Value: mongodb.Namespace(coll)}, {Key: "id", Value: id}}
}

// markedRows returns the ids of the rows that have a mark, as texts.
func (r *importRun) markedRows(ctx context.Context, coll *mongo.Collection, rows []bson.Raw) (map[string]bool, error) {
	ids := make(bson.A, len(rows))
	for i, raw := range rows {
		ids[i] = markOf(coll, raw.Lookup("_id"))
	}

	found := map[string]bool{}
	err := mongodb.FindEach(ctx, r.marks, "reading the marks of imported rows", bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, func(raw bson.Raw) error {
		found[raw.Lookup("_id", "id").String()] = true
		return nil
	}, options.Find().SetProjection(mongodb.Fields("_id")))
	return found, err
}

// withoutExisting leaves out the items whose id the outbox has. If the service has appended the event, or an earlier run has imported the row,
// the row is known. It rejects a row whose id another row has: only one of them would be sent, and consumers recognize an event by its id.
func (r *importRun) withoutExisting(ctx context.Context, ns string, list []converted) ([]converted, error) {
	rows, err := r.rowsOfEnvelopes(ctx, list)
	if err != nil {
		return nil, err
	}

	out := list[:0]
	for _, c := range list {
		// Ids from the server are compared as BSON.
		raw, err := bson.Marshal(c.doc[:1])
		if err != nil {
			return nil, err
		}
		id := bson.Raw(raw).Lookup("_id")
		switch present, found := rows[id.String()]; {
		case !found:
			// Another row of the batch may have the same id.
			rows[id.String()] = c.rowID
			out = append(out, c)
		case present.IsZero(), present.Equal(c.rowID):
			r.report.Known++
		default:
			r.reject(ns, c.rowID, fmt.Errorf("row %s is the event %s too, and only one event can have an id", present, id))
		}
	}
	return out, nil
}

// rowsOfEnvelopes returns the envelopes of the outbox that have the ids of the items, by the text of the id: the id of the row that was
// imported as the envelope, or the zero value if the service has appended it.
func (r *importRun) rowsOfEnvelopes(ctx context.Context, list []converted) (map[string]bson.RawValue, error) {
	ids := make(bson.A, len(list))
	for i, c := range list {
		ids[i] = c.item.id
	}

	// Only the ids are compared, in one query for the batch.
	rows := map[string]bson.RawValue{}
	err := mongodb.FindEach(ctx, r.outbox, "reading the outbox", bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, func(raw bson.Raw) error {
		rows[raw.Lookup("_id").String()] = mongodb.CloneValue(raw.Lookup("imported", "id"))
		return nil
	}, options.Find().SetProjection(mongodb.Fields("imported.id")))
	return rows, err
}

// writeBatch writes the items with their marks in one transaction: new events into the outbox, events that the library has
// tried before among those that wait, and events that it gave up among the dead letters.
func (r *importRun) writeBatch(ctx context.Context, list []converted) error {
	var docs, marks []any
	var entries []waiting.Entry
	var dying []*letters.Prepared
	for _, c := range list {
		marks = append(marks, bson.D{{Key: "_id", Value: c.mark}, {Key: "from", Value: r.source.name}, {Key: "at", Value: r.now}})
		if c.kind == pending || c.kind == scheduled {
			docs = append(docs, c.doc)
			continue
		}

		raw, err := r.stampedEnvelope(c.doc)
		if err != nil {
			return err
		}
		if c.kind == retried {
			entries = append(entries, r.newEntry(c.item, raw))
			continue
		}
		letter, err := letters.Prepare(r.newLetter(c.item, raw))
		if err != nil {
			return err
		}
		dying = append(dying, letter)
	}

	// Chunks without their letter do no harm.
	if err := letters.WriteChunks(ctx, unfenced{r.client}, r.state.Collection("letters"), dying); err != nil {
		return err
	}
	return mongodb.InTransaction(ctx, r.client, func(tx context.Context) error {
		if len(docs) > 0 {
			outbox := r.client.Database(r.outbox.Database().Name()).Collection(r.outbox.Name())
			if _, err := outbox.InsertMany(tx, docs); err != nil {
				return mongodb.DescribeError(err, "writing envelopes", "insert", r.options.To)
			}
		}
		if err := waiting.Enter(tx, r.state.Collection("waiting"), entries); err != nil {
			return err
		}
		if err := letters.Write(tx, r.state.Collection("letters"), r.now, dying); err != nil {
			return err
		}
		if len(marks) == 0 {
			return nil
		}
		imports := r.state.Collection("imports")
		_, err := imports.InsertMany(tx, marks)
		return mongodb.DescribeError(err, "writing the marks of imported rows", "insert", mongodb.Namespace(imports))
	})
}

// stampedEnvelope returns the envelope with the time of the import. The server replaces the empty timestamp only in an
// outbox.
func (r *importRun) stampedEnvelope(doc bson.D) (bson.Raw, error) {
	stamped := slices.Clone(doc)
	for i := range stamped {
		if stamped[i].Key == "ts" {
			stamped[i].Value = r.at
		}
	}
	return bson.Marshal(stamped)
}

// newEntry returns an event that waits for its next attempt.
func (r *importRun) newEntry(item *item, raw bson.Raw) waiting.Entry {
	// The envelope was parsed before, so it has a key and a slot.
	var view envelope.View
	_ = envelope.Parse(raw, &view)
	next := r.now
	if item.due.After(next) {
		next = item.due
	}
	return waiting.Entry{
		Watcher: r.cfg.Watcher, NS: r.options.To, Raw: raw, Key: string(view.OrderingKey()), Slot: view.Slot,
		Pos: outboxes.PosAt(r.at), Reason: waiting.Retry, Origin: waiting.OriginRequeue, NextAt: next, Attempts: item.attempts,
	}
}

// newLetter returns the dead letter of an event. outrelay has never tried to send the event, so the reason comes from the
// other library.
func (r *importRun) newLetter(item *item, raw bson.Raw) letters.Letter {
	reason := item.reason
	if reason == "" {
		reason = r.source.name + " gave it up"
	}
	if n := item.attempts; n > 0 {
		reason = fmt.Sprintf("%s (attempts of %s: %d)", reason, r.source.name, n)
	}
	failed := item.at
	if failed.IsZero() {
		failed = r.now
	}
	return letters.Letter{
		Watcher: r.cfg.Watcher, NS: r.options.To, Raw: raw, Pos: outboxes.PosAt(r.at), Class: record.AttemptsExhausted,
		Reason: reason, Partition: record.AnyPartition, Source: letters.Source{Kind: "relay", Watcher: r.cfg.Watcher},
		FirstFailure: failed, Expire: r.cfg.DeadLetters.Expire,
	}
}

// unfenced runs transactions without a fence: what an import writes does not depend on the owner of the watcher.
type unfenced struct{ client *mongo.Client }

func (u unfenced) Fenced(ctx context.Context, _ bson.D, fn func(ctx context.Context) error) error {
	return mongodb.InTransaction(ctx, u.client, fn)
}
