// Package catalog has the texts of every metric: its labels, its unit, its meaning and the fix. The metrics of the relay
// and of services take their help from it, and the tables of docs/metrics.md are generated from it.
package catalog

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// section is a table of docs/metrics.md.
type section struct {
	title   string
	metrics []Metric
}

// Metric has the texts of one metric. They are Markdown in one line.
type Metric struct {
	Name   string
	Labels []string // in the order in which the code sets their values
	Unit   string
	Help   string // one sentence, which /metrics serves too
	Detail string // further sentences and the values of labels; empty: none
	Fix    string // what to do; empty: nothing
}

// Find returns the metric with a name. It panics if there is none: a metric without texts is a mistake of the program.
func Find(name string) Metric {
	for _, s := range sections {
		for _, m := range s.metrics {
			if m.Name == name {
				return m
			}
		}
	}
	panic("metrics: no texts for " + name)
}

// Titles returns the titles of the tables.
func Titles() []string {
	var titles []string
	for _, s := range sections {
		titles = append(titles, s.title)
	}
	return titles
}

// Table returns the table with a title in Markdown.
func Table(title string) string {
	var builder strings.Builder
	builder.WriteString("| metric | unit | meaning | what to do |\n|---|---|---|---|\n")
	i := slices.Index(Titles(), title)
	for _, m := range sections[i].metrics {
		labels := ""
		if len(m.Labels) > 0 {
			labels = "{" + strings.Join(m.Labels, ",") + "}"
		}
		fmt.Fprintf(&builder, "| `%s%s` | %s | %s | %s |\n", m.Name, labels, m.Unit, strings.TrimSpace(m.Help+" "+m.Detail), cmp.Or(m.Fix, "–"))
	}
	return builder.String()
}

// sections are the tables, in the order of docs/metrics.md.
var sections = []section{
	{title: "Health overview", metrics: []Metric{
		{
			Name: "outrelay_ready", Unit: "0, 1",
			Help: "1 while `/readyz` reports that the process works, as owner or as standby.",
			Fix:  "0 for long: `GET /readyz` returns the reasons",
		},
		{
			Name: "outrelay_problem_seconds", Labels: []string{"kind", "object", "severity"}, Unit: "s",
			Help: "Age of each problem of the list that `outrelay status` shows; 0 if its begin is unknown, and no series without a problem.",
			Detail: "[troubleshooting.md](troubleshooting.md) lists the kinds, `object` is the topic, slot, node, outbox or watcher, and `severity` is `warn` or `fail`. " +
				"Every process reports the problems that it finds, so use `max by (kind, object)`.",
			Fix: "`outrelay status` and `/readyz` show cause, consequence and fix",
		},
		{
			Name: "outrelay_lag_seconds", Unit: "s",
			Help:   "Age of the oldest envelope that was read and is neither acked by Kafka nor stored as waiting or dead; 0 if there is none.",
			Detail: "While the change stream stands, at least the time since then. No series while this process does not deliver. The [lag](concepts.md#progress), the same number as `LAG` in `outrelay status` and \"lag\" on the page. The most important figure for alerts.",
			Fix:    "`outrelay status`: a topic that cannot be written, a full budget, or Kafka unreachable",
		},
		{
			Name: "outrelay_token_age_seconds", Unit: "s",
			Help: "Server time minus the time of the position.",
			Fix:  "Compare it with the oplog window: beyond the window, history is lost",
		},
		{
			Name: "outrelay_oplog_window_seconds", Unit: "s",
			Help: "Time from the first to the last entry of the oplog; 0 if the user may not read it.",
			Fix:  "Enlarge the oplog if the token age reaches half of it",
		},
		{
			Name: "outrelay_kafka_reachable", Unit: "0, 1",
			Help: "1 while the Kafka cluster responds to the heartbeat of this process.",
			Fix:  "Check brokers, network, credentials; run `outrelay doctor`",
		},
		{
			Name: "outrelay_mongodb_reachable", Unit: "0, 1",
			Help: "1 while the replica set responds to the heartbeat of this process.",
			Fix:  "Check members, network, credentials; run `outrelay doctor`",
		},
		{
			Name: "outrelay_nodes", Labels: []string{"state"}, Unit: "processes",
			Help:   "Processes in the state database by their heartbeat.",
			Detail: "`alive`, or `stale` (no heartbeat for ten seconds).",
			Fix:    "If only one is alive, there is no standby",
		},
		{
			Name: "outrelay_watcher_info", Labels: []string{"watcher", "node"}, Unit: "1",
			Help: "Always 1; the labels name the watcher and the node of the process.",
		},
		{
			Name: "outrelay_build_info", Labels: []string{"version", "go"}, Unit: "1",
			Help: "Always 1; the labels name the build.",
			Fix:  "Two versions for long: a roll-out is stuck",
		},
	}},
	{title: "Flow", metrics: []Metric{
		{
			Name: "outrelay_published_total", Labels: []string{"topic", "result"}, Unit: "records",
			Help:   "Records by topic and result.",
			Detail: "`acked`: Kafka has the record. `skipped`: an acked record that a read-back found in the topic. `rejected`: its envelope became a dead letter for this topic.",
		},
		{
			Name: "outrelay_publish_latency_seconds", Unit: "s",
			Help:   "Time from the commit in MongoDB to the ack of Kafka, for each record.",
			Detail: "With exemplars.",
			Fix:    "Grows with the load: check budget, brokers, `kafka.requests_per_broker`",
		},
		{
			Name: "outrelay_read_total", Unit: "envelopes",
			Help: "Envelopes read from the change stream.",
			Fix:  "Does not grow although services write: check the stream's state",
		},
		{
			Name: "outrelay_read_bytes_total", Unit: "bytes",
			Help: "Size of the envelopes read from the change stream.",
		},
		{
			Name: "outrelay_read_batches_total", Unit: "responses",
			Help: "Responses of the change stream that contained events.",
		},
		{
			Name: "outrelay_inflight_records", Unit: "records",
			Help: "Records that the sink has accepted and Kafka has not acknowledged.",
		},
		{
			Name: "outrelay_inflight_bytes", Unit: "bytes",
			Help: "Size of the records that the sink has accepted and Kafka has not acknowledged.",
		},
		{
			Name: "outrelay_budget_used_bytes", Unit: "bytes",
			Help: "Part of the memory budget in use.",
			Fix:  "Full: Kafka accepts less than the stream delivers",
		},
		{
			Name: "outrelay_budget_bytes", Unit: "bytes",
			Help:   "The memory budget, `limits.memory`.",
			Detail: "With slots: the present part of this slot; the slots of a process have equal parts.",
		},
		{
			Name: "outrelay_ticket_window", Unit: "events",
			Help: "Events between the resolved position and the newest event that was read.",
			Fix:  "At the maximum, reading waits: one target is slow",
		},
		{
			Name: "outrelay_ticket_window_max", Unit: "events",
			Help:   "Events after the resolved position at which reading waits, `limits.tickets`.",
			Detail: "Divided in the same way.",
		},
		{
			Name: "outrelay_stream_state", Labels: []string{"state"}, Unit: "0, 1",
			Help:   "1 for the state of the change stream.",
			Detail: "`opening`, `live`, `reopening`, `config_error`, `oversize`, `stopped`.",
			Fix:    "`config_error`: the log names what to grant or change",
		},
		{
			Name: "outrelay_stream_restarts_total", Labels: []string{"reason"}, Unit: "reopenings",
			Help: "Reopenings of the change stream.",
			Fix:  "A few during an election are normal",
		},
		{
			Name: "outrelay_gaps_total", Labels: []string{"reason"}, Unit: "gaps",
			Help: "Gaps: ranges of the stream that can no longer be read.",
			Fix:  "The relay sweeps; see `outrelay audit`",
		},
	}},
	{title: "Ownership", metrics: []Metric{
		{
			Name: "outrelay_lease_owner", Unit: "0, 1",
			Help: "1 while this process owns the watcher, or the slot.",
			Fix:  "The sum over all processes is 1 for each slot",
		},
		{
			Name: "outrelay_lease_epoch", Unit: "number",
			Help: "Epoch of the last known ownership.",
		},
		{
			Name: "outrelay_lease_suspended", Unit: "0, 1",
			Help:   "1 while the lease is past its local deadline.",
			Detail: "Work waits; nothing is lost.",
			Fix:    "MongoDB is slow or elects a primary",
		},
		{
			Name: "outrelay_lease_renew_seconds", Unit: "s",
			Help: "Duration of one renewal of the lease.",
			Fix:  "Near `lease.renew`: MongoDB is overloaded",
		},
		{
			Name: "outrelay_lease_lost_total", Unit: "times",
			Help: "Ownerships that ended without a release.",
		},
		{
			Name: "outrelay_takeovers_total", Unit: "times",
			Help: "Acquisitions of the lease by this process.",
			Fix:  "Many in a short time: see OutrelayTakeoversFlap",
		},
		{
			Name: "outrelay_checkpoint_seconds", Unit: "s",
			Help: "Duration of the write of one checkpoint.",
		},
		{
			Name: "outrelay_checkpoints_total", Unit: "writes",
			Help: "Checkpoints written.",
		},
		{
			Name: "outrelay_checkpoint_age_seconds", Unit: "s",
			Help: "Time since the last checkpoint.",
			Fix:  "High with lag 0 is normal on an idle cluster. High with lag is a fault",
		},
		{
			Name: "outrelay_read_back_records_total", Unit: "records",
			Help: "Records read at takeovers to find the envelopes that were sent already.",
		},
		{
			Name: "outrelay_read_back_hits_total", Unit: "envelopes",
			Help: "Envelopes that were not sent again, because the read-back found their records in the topic.",
		},
		{
			Name: "outrelay_quarantined_partitions", Unit: "partitions",
			Help: "Partitions that wait until earlier senders are fenced.",
			Fix:  "Bring their leaders back",
		},
	}},
	{title: "Waiting envelopes and dead letters", metrics: []Metric{
		{
			Name: "outrelay_waiting_envelopes", Labels: []string{"reason"}, Unit: "envelopes",
			Help:   "Waiting envelopes of the watcher by reason.",
			Detail: "`retry` after a failed attempt, `blocked` after an earlier one of the key, `parked` for a topic, and `queued` to be sent next. An envelope counts for each topic that it waits for.",
			Fix:    "`outrelay waiting summary`",
		},
		{
			Name: "outrelay_unwritable_records", Labels: []string{"topic", "reason"}, Unit: "records",
			Help:   "Records for an unwritable topic, by reason: held, given back or not taken.",
			Detail: "`missing`, `too_small`, `forbidden`, `no_leader`, `quarantined`, `rejected`, `unreachable`, `opening`, `throttled`. Above 100 topics, the sum of the others is `other`.",
			Fix:    "Create the topic, grant the right, or bring the leader back",
		},
		{
			Name: "outrelay_dead_letters_total", Labels: []string{"class"}, Unit: "envelopes",
			Help: "Envelopes that this process moved to the dead letters.",
			Fix:  "`outrelay dead summary`",
		},
		{
			Name: "outrelay_dead_letters_stored", Labels: []string{"collection"}, Unit: "dead letters",
			Help: "Dead letters in the collection, by its metadata, including requeued ones.",
			Fix:  "Requeue or discard",
		},
	}},
	{title: "Collections", metrics: []Metric{
		{
			Name: "outrelay_pending_envelopes", Labels: []string{"collection"}, Unit: "envelopes",
			Help:   "Envelopes after the position.",
			Detail: "Envelopes of long transactions may be missing for a while.",
			Fix:    "Grows while the lag grows",
		},
		{
			Name: "outrelay_oldest_pending_seconds", Labels: []string{"collection"}, Unit: "s",
			Help:   "Time since the oldest envelope after the position was written; 0 if there is none.",
			Detail: "To the second.",
			Fix:    "For a stopped owner. Unlike the lag, it includes events that the stream has not delivered yet",
		},
		{
			Name: "outrelay_scheduled_envelopes", Labels: []string{"collection"}, Unit: "envelopes",
			Help: "Envelopes that wait for their due time.",
		},
		{
			Name: "outrelay_scheduled_overdue_seconds", Labels: []string{"collection"}, Unit: "s",
			Help: "Time since the first scheduled envelope was due; 0 if none is due.",
			Fix:  "A topic that cannot be written, or a missing index",
		},
		{
			Name: "outrelay_inbox_entries", Labels: []string{"collection"}, Unit: "documents",
			Help: "Marks of handled messages in the inboxes of the outbox's database, by their metadata.",
			Fix:  "The retention of the inbox: seven days by default",
		},
		{
			Name: "outrelay_handler_dead_letters", Labels: []string{"group", "handler", "class"}, Unit: "messages",
			Help:   "Dead letters of handlers that are not requeued yet, in the databases of services.",
			Detail: "At most 100 series; the others are added up as `other`. Counting stops at 100,000 letters of a collection.",
			Fix:    "`outrelay dead summary --source handler`",
		},
		{
			Name: "outrelay_missing_indexes", Labels: []string{"collection"}, Unit: "indexes",
			Help:   "Declared indexes that the collection lacks.",
			Detail: "Checked every five minutes.",
			Fix:    "`outrelay setup`, `--dry-run`",
		},
		{
			Name: "outrelay_figures_age_seconds", Unit: "s",
			Help: "Time since the collections were counted; 0 in a process that does not count.",
			Fix:  "High: MongoDB is slow or rejects the queries",
		},
		{
			Name: "outrelay_figures_limit", Unit: "entries",
			Help:   "Limit of a count.",
			Detail: "A count of this value means “at least”.",
		},
	}},
	{title: "Reconciler and purge", metrics: []Metric{
		{
			Name: "outrelay_dropped_total", Labels: []string{"class"}, Unit: "envelopes",
			Help:   "Envelopes that were discarded.",
			Detail: "`expired` with `expired: drop`, `dropped` by a rule with `drop: true`.",
		},
		{
			Name: "outrelay_reconciled_total", Labels: []string{"class"}, Unit: "envelopes",
			Help:   "Envelopes that were finished or changed state.",
			Detail: "`finished`, `retrying`, `waiting`, `dead`, `dropped`, `gone`, `swept`, `expired_dropped`, and the states that envelopes of the stream got.",
		},
		{
			Name: "outrelay_scheduled_due_error_seconds", Unit: "s",
			Help: "Time from the due time of a scheduled envelope to its ack by Kafka.",
			Fix:  "p99 below 1 s is normal",
		},
		{
			Name: "outrelay_purged_total", Unit: "envelopes",
			Help: "Delivered envelopes that were removed after `retention`.",
			Fix:  "Below the write rate for long: raise `purge.rate`",
		},
	}},
	{title: "Kafka and process", metrics: []Metric{
		{
			Name: "outrelay_produce_errors_total", Labels: []string{"error"}, Unit: "responses",
			Help: "Responses of Kafka other than success, by name.",
			Fix:  "Moved leaders are normal",
		},
		{
			Name: "outrelay_kafka_throttled_seconds_total", Unit: "s",
			Help:   "Time for which connections for records have waited because of a quota of Kafka.",
			Detail: "Several connections add up.",
			Fix:    "Rising: raise `producer_byte_rate` or `request_percentage` of the client id",
		},
		{
			Name: "outrelay_mongodb_connections", Labels: []string{"client", "state"}, Unit: "connections",
			Help: "Connections of this process to MongoDB, and calls that wait for one.",
			Detail: "`client` is `stream` (the change stream and reads of outboxes) or `state` (the lease and everything that is stored). `open` and `in_use` " +
				"count connections to all members, `waiting` counts calls. With `relay.WithMongoClient` there are none: use `telemetry.MonitorPool`.",
			Fix: "`waiting` above 0 for long: see [connections](services.md#connections)",
		},
		{
			Name: "outrelay_mongodb_checkouts_total", Labels: []string{"client"}, Unit: "calls",
			Help: "Calls to MongoDB that got a connection.",
		},
		{
			Name: "outrelay_mongodb_checkout_seconds_total", Labels: []string{"client"}, Unit: "s",
			Help:   "Time for which these calls waited for their connection.",
			Detail: "Its rate, divided by that of `outrelay_mongodb_checkouts_total`, is the mean wait.",
			Fix:    "A mean above 10 ms: too few connections, or slow handshakes",
		},
		{
			Name: "outrelay_mongodb_checkouts_failed_total", Labels: []string{"client", "reason"}, Unit: "calls",
			Help:   "Calls to MongoDB that got no connection.",
			Detail: "`timeout`, `connectionError`, `poolClosed`.",
			Fix:    "`connectionError`: a member is away, or rejects the login; `timeout`: too few connections",
		},
		{
			Name: "outrelay_admin_rejected_total", Labels: []string{"reason"}, Unit: "requests",
			Help:   "Requests that the operator's listener rejected before it processed them.",
			Detail: "`login`, `origin`, `host`, `rate`, `busy`.",
			Fix:    "Many of `login`: somebody guesses tokens; the log contains the address",
		},
		{
			Name: "outrelay_config_reloads_total", Labels: []string{"what", "result"}, Unit: "reloads",
			Help:   "Reloads of the configuration and of certificates.",
			Detail: "`settings`: the configuration, by SIGHUP. `certificates`: changed TLS files, once for each client or listener that uses them. `applied`, or `rejected`: the previous values stay in use.",
			Fix:    "`rejected`: the log has the reason; fix it before the next start",
		},
		{
			Name: "outrelay_otlp_exports_total", Labels: []string{"signal", "result"}, Unit: "exports",
			Help:   "Exports to the OTLP collector.",
			Detail: "`traces`, `metrics`; `ok`, `failed`.",
			Fix:    "The log has the reason, once",
		},
		{
			Name: "outrelay_spans_limited_total", Unit: "deliveries",
			Help: "Deliveries without a span because of `otel.spans_per_second`.",
			Fix:  "Lower `otel.sample_percent`, or raise the rate",
		},
	}},
	{title: "Consumers", metrics: ofServices},
}
