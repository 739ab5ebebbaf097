package catalog

// ofServices are the metrics of outboxes and consumers inside of services.
var ofServices = []Metric{
	{
		Name: "outrelay_consumer_handled_total", Labels: []string{"group", "handler"}, Unit: "messages",
		Help: "Messages that were handled.",
	},
	{
		Name: "outrelay_consumer_handle_seconds", Labels: []string{"group", "handler"}, Unit: "s",
		Help: "Time of one successful attempt with its commit.",
	},
	{
		Name: "outrelay_consumer_duplicates_total", Labels: []string{"group", "handler"}, Unit: "messages",
		Help: "Duplicates that the inbox detected.",
		Fix:  "Many after a crash are normal",
	},
	{
		Name: "outrelay_consumer_unknown_total", Labels: []string{"group"}, Unit: "messages",
		Help: "Messages that no handler takes: dead letters of class unknown, or skipped (WithSkip).",
		Fix:  "Register a handler, or skip the type",
	},
	{
		Name: "outrelay_consumer_dropped_total", Labels: []string{"group", "handler"}, Unit: "messages",
		Help: "Messages that passed without being handled.",
	},
	{
		Name: "outrelay_consumer_dead_letters_total", Labels: []string{"group", "handler", "class"}, Unit: "messages",
		Help: "Messages that became dead letters.",
		Fix:  "`outrelay dead list`",
	},
	{
		Name: "outrelay_consumer_waiting_messages", Labels: []string{"group", "handler"}, Unit: "messages",
		Help: "Messages set aside for a retry, in the whole group.",
		Fix:  "Find the cause: `last_error` in the status, reported errors",
	},
	{
		Name: "outrelay_consumer_oldest_waiting_seconds", Labels: []string{"group", "handler"}, Unit: "s",
		Help: "Time since the first failure of the oldest message set aside.",
		Fix:  "As above; it becomes a dead letter after 24 h",
	},
	{
		Name: "outrelay_consumer_stray_messages", Labels: []string{"group", "handler", "topic", "reason"}, Unit: "messages",
		Help:   "Messages set aside for a topic, a partition or a handler that is gone.",
		Detail: "`unread`, `no_handler`.",
		Fix:    "`unread`: one member retries them. `no_handler`: register the handler in all members. If none has it, `Retire` removes its messages",
	},
	{
		Name: "outrelay_consumer_failures_total", Labels: []string{"group", "handler", "action"}, Unit: "attempts",
		Help: "Failed attempts, by the action that follows.",
	},
	{
		Name: "outrelay_consumer_lag_messages", Labels: []string{"group", "topic", "partition"}, Unit: "offsets",
		Help: "Offsets of the partition after the last finished one.",
		Fix:  "More members, or faster handlers",
	},
	{
		Name: "outrelay_consumer_oldest_unfinished_seconds", Labels: []string{"group", "topic", "partition"}, Unit: "s",
		Help: "Age of the oldest message that was read and is not finished; 0 if there is none.",
		Fix:  "Find the cause: reported errors, a waiting retry, a handler that hangs",
	},
	{
		Name: "outrelay_consumer_held_messages", Labels: []string{"group"}, Unit: "messages",
		Help: "Messages in memory.",
	},
	{
		Name: "outrelay_consumer_held_bytes", Labels: []string{"group"}, Unit: "bytes",
		Help: "Size of the messages in memory.",
	},
	{
		Name: "outrelay_consumer_running_lanes", Labels: []string{"group"}, Unit: "running lanes",
		Help: "Lanes that run a handler now.",
	},
	{
		Name: "outrelay_consumer_assigned_partitions", Labels: []string{"group"}, Unit: "partitions",
		Help: "Partitions of this member.",
		Fix:  "0 for long: more members than partitions",
	},
	{
		Name: "outrelay_consumer_generations_total", Labels: []string{"group"}, Unit: "generations",
		Help: "Generations of the group in which this member took part.",
		Fix:  "Many: members join and leave often",
	},
	{
		Name: "outrelay_consumer_commits_total", Labels: []string{"group", "result"}, Unit: "commits",
		Help:   "Commits of offsets.",
		Detail: "`ok`, `failed`.",
	},
	{
		Name: "outrelay_consumer_suspended", Labels: []string{"group", "handler", "reason"}, Unit: "0, 1",
		Help:   "1 while the member fetches nothing, or a handler takes no messages.",
		Detail: "`paused`, `database`: the member. `handler`: the handler.",
		Fix:    "MongoDB, a manual pause, or the failures of the handler",
	},
	{
		Name: "outrelay_service_connections", Labels: []string{"state"}, Unit: "connections",
		Help:   "Connections of the service to MongoDB, and calls that wait for one.",
		Detail: "`open` and `in_use` count connections to all members, `waiting` counts calls. Of clients with `telemetry.MonitorPool`.",
		Fix:    "`waiting` above 0 for long: see [connections](services.md#connections)",
	},
	{
		Name: "outrelay_service_checkout_seconds", Unit: "s",
		Help: "Time for which a call to MongoDB waited for its connection.",
		Fix:  "Above 10 ms: raise the maximum of the pool, or start it with a minimum",
	},
	{
		Name: "outrelay_service_checkouts_failed_total", Labels: []string{"reason"}, Unit: "calls",
		Help:   "Calls to MongoDB that got no connection.",
		Detail: "`timeout`, `connectionError`, `poolClosed`.",
		Fix:    "`connectionError`: a member is away, or rejects the login; `timeout`: too few connections",
	},
	{
		Name: "outrelay_consumer_rate_waiting_lanes", Labels: []string{"group", "handler"}, Unit: "waiting lanes",
		Help: "Lanes of a handler that wait for its rate limit.",
		Fix:  "Together with a growing lag: the limit (WithRate) is too low for the load",
	},
	{
		Name: "outrelay_outbox_appended_total", Unit: "events",
		Help: "Events appended, also by transactions that are rolled back later.",
	},
}
