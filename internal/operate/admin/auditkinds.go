package admin

import (
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// AuditKinds returns the kinds of the entries that nodes and operators write, sorted. The entries about Kafka have other
// kinds, which begin with kafka_.
func AuditKinds() []string {
	kinds := []string{
		"copy_accepted", "cleared", "clearing", "collection_released", "audit_trimmed", "inbox_purged", "inbox_released",
		"indexes_repaired", "migrated", "node_released", "node_removed", "payload_shown", "pinned", "position_adopted", "purged",
		"recover_ordered", "event_skipped", "replay_cancelled", "replay_ordered", "replay_queued", "replay_resumed", "resliced",
		"rows_imported", scheduledCancelled, "scheduled_moved", "watcher_removed", "watcher_removing",
	}

	// These kinds are constants of their packages.
	for _, k := range slices.Concat(nodes.Kinds(), []nodes.Kind{
		problemAcknowledged, deadRequeued, deadEdited, deadDiscarding, deadDiscarded, failedReset, failedRetried,
		handlerRetried, handlerDiscarded, topicCreated, topicExtended,
	}) {
		kinds = append(kinds, string(k))
	}
	slices.Sort(kinds)
	return slices.Compact(kinds)
}

// IsAuditKind reports whether entries of the audit log may have this kind.
func IsAuditKind(kind string) bool {
	return strings.HasPrefix(kind, "kafka_") || slices.Contains(AuditKinds(), kind)
}
