package admin

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// Groups are the consumer groups that read the topics of the watcher: their members and partitions as Kafka has them, and what their
// members have recorded in MongoDB.
type Groups struct{ op Operator }

// GroupList has the groups with the greatest lag first.
type GroupList struct {
	Groups []Group `json:"groups"`
	Others int     `json:"others"` // groups that read no topic of the watcher, and are left out
	// Problems are sentences about what cannot be read of all groups. The problem of one group is in the group.
	Problems []string `json:"problems"`
}

// Group is a consumer group.
type Group struct {
	Group  string   `json:"group"`
	State  string   `json:"state"` // Stable, PreparingRebalance, CompletingRebalance, Empty (no member runs), Dead (it does not exist), or "" if unknown
	Topics []string `json:"topics"`
	// Lag is the sum of the partitions with a committed offset. It includes markers of transactions, which are no messages. It is
	// missing if the offsets cannot be read.
	Lag        *int64 `json:"lag,omitempty"`
	Unassigned int    `json:"unassigned,omitempty"` // partitions that no member reads
	Idle       int    `json:"idle,omitempty"`       // members without a partition
	// Retrying is the lag in retry topics of the group (WithRetryTopics): messages that wait there for another attempt.
	Retrying   int64            `json:"retrying,omitempty"`
	Members    []GroupMember    `json:"members"`    // unknown if the state is unknown
	Partitions []GroupPartition `json:"partitions"` // only of one group
	Handlers   []GroupHandler   `json:"handlers"`   // with messages that wait, or that take none; only of consumers of pkg/consumer
	Paused     int              `json:"paused"`     // members that Consumer.Pause has stopped
	Problem    string           `json:"problem,omitempty"`
}

// GroupMember is a member of a group.
type GroupMember struct {
	ID         string `json:"id"`
	Instance   string `json:"instance,omitempty"` // of a static member
	ClientID   string `json:"client_id"`
	Host       string `json:"host"`
	Partitions int    `json:"partitions"`
}

// Name returns the name of a static member. That of another member is its id without the id of its client, with which it begins.
func (m GroupMember) Name() string {
	return cmp.Or(m.Instance, strings.TrimPrefix(m.ID, m.ClientID+"-"))
}

// GroupPartition is a partition that a group reads.
type GroupPartition struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Committed *int64 `json:"committed,omitempty"` // the next offset; missing if the group has committed none
	End       *int64 `json:"end,omitempty"`       // missing if the topic does not exist, or may not be described
	Lag       *int64 `json:"lag,omitempty"`       // missing if one of them is
	Member    string `json:"member,omitempty"`    // the id of the member that reads it; missing without one
}

// GroupHandler is a handler of a group.
type GroupHandler struct {
	Handler  string     `json:"handler"`
	Waiting  int64      `json:"waiting"`             // messages that it retries, or that follow such a message
	FailedAt *time.Time `json:"failed_at,omitempty"` // the first failure of the oldest of them
	// Suspended is the number of members that have suspended the handler, and Paused is the number of members in which a program has paused it.
	Suspended int `json:"suspended"`
	Paused    int `json:"paused"`
	// Until is when a member tries the next message, and Reason is the last failure. In a list, only handlers that a member has suspended have them.
	Until  *time.Time `json:"until,omitempty"`
	Reason string     `json:"reason,omitempty"`
}

// List returns the groups that read a topic of the watcher, or that consumers in the databases of services have, without their
// partitions; with all, every group that the Kafka login may see. A topic is of the watcher if its owners have reported it.
func (g Groups) List(ctx context.Context, all bool) (GroupList, error) {
	list := GroupList{Groups: []Group{}, Problems: []string{}}
	notes, err := g.readNotes(ctx, "")
	if err != nil {
		return list, err
	}
	own, err := g.ownTopics(ctx)
	if err != nil {
		return list, err
	}

	var names []string
	for name := range notes {
		names = append(names, name)
	}
	found, err := g.read(ctx, connect.GroupQuery{Names: names, All: true})
	if err != nil {
		return list, err
	}
	list.Problems = append(list.Problems, found.Problems...)

	for i := range found.Groups {
		group := newGroup(&found.Groups[i], found.Ends, notes[found.Groups[i].Name])
		isOwn := notes[group.Group] != nil || slices.ContainsFunc(group.Topics, func(topic string) bool { return own[topic] })
		if !all && !isOwn {
			list.Others++
			continue
		}
		group.Partitions = []GroupPartition{}
		list.Groups = append(list.Groups, group)
	}
	slices.SortStableFunc(list.Groups, func(a, b Group) int { return cmp.Compare(b.knownLag(), a.knownLag()) })
	return list, nil
}

// Show returns one group with its partitions. It returns an error if the group does not exist.
func (g Groups) Show(ctx context.Context, name string) (Group, error) {
	if name == "" {
		return Group{}, invalidRequest("the name of the group is empty; list the groups for their names")
	}
	notes, err := g.readNotes(ctx, name)
	if err != nil {
		return Group{}, err
	}
	found, err := g.read(ctx, connect.GroupQuery{Names: []string{name}})
	if err != nil {
		return Group{}, err
	}

	group := newGroup(&found.Groups[0], found.Ends, notes[name])
	if group.State == "Dead" && len(group.Partitions) == 0 && notes[name] == nil {
		return group, wrapError("consumer group "+name, mongodb.ErrNotFound)
	}
	if len(found.Problems) > 0 && group.Problem == "" {
		group.Problem = strings.Join(found.Problems, "; ")
	}
	return group, nil
}

// read reads groups from Kafka.
func (g Groups) read(ctx context.Context, query connect.GroupQuery) (connect.Groups, error) {
	if g.op.KafkaGroups == nil {
		return connect.Groups{}, wrapError("reading consumer groups", ErrUnavailable)
	}
	found, err := g.op.KafkaGroups(ctx, query)
	if err != nil {
		return found, &KafkaError{err}
	}
	return found, nil
}

// groupNotes is what MongoDB has of a group.
type groupNotes struct {
	handlers map[string]*GroupHandler
	paused   int
}

// findHandler returns the notes of a handler, which it adds if they are missing.
func (n *groupNotes) findHandler(name string) *GroupHandler {
	handler := n.handlers[name]
	if handler == nil {
		handler = &GroupHandler{Handler: name}
		n.handlers[name] = handler
	}
	return handler
}

// readNotes returns what the members of the groups have recorded in the databases of services, by group; of one group also the next
// attempts.
func (g Groups) readNotes(ctx context.Context, only string) (map[string]*groupNotes, error) {
	desks, err := g.op.HandlerWaiting().resolve(ctx, HandlerWaitingFilter{})
	if err != nil {
		return nil, err
	}

	all := map[string]*groupNotes{}
	for _, desk := range desks {
		list, err := desk.Groups(ctx, only)
		if err != nil {
			return nil, err
		}
		for _, note := range list {
			notes := all[note.Group]
			if notes == nil {
				notes = &groupNotes{handlers: map[string]*GroupHandler{}}
				all[note.Group] = notes
			}

			for _, count := range note.Counts {
				handler := notes.findHandler(strings.TrimPrefix(count.Handler, note.Group+"/"))
				handler.Waiting += count.N
				if since := inUTC(&count.Since); since != nil && compareFirst(since, handler.FailedAt) < 0 {
					handler.FailedAt = since
				}
			}
			for _, stop := range note.Stops {
				if stop.Handler == "" {
					notes.paused++
					continue
				}
				handler := notes.findHandler(stop.Handler)
				handler.Reason = cmp.Or(stop.Reason, handler.Reason)
				if stop.Until.IsZero() {
					handler.Paused++
					continue
				}
				handler.Suspended++
				if until := inUTC(&stop.Until); compareFirst(until, handler.Until) < 0 {
					handler.Until = until
				}
			}
		}

		if notes := all[only]; notes != nil {
			next, err := desk.NextAttempts(ctx, only)
			if err != nil {
				return nil, err
			}
			notes.addNextAttempts(next)
		}
	}
	return all, nil
}

// addNextAttempts adds the next attempts to the handlers of a group.
func (n *groupNotes) addNextAttempts(list []setaside.NextAttempt) {
	for _, next := range list {
		_, name := (&setaside.Place{Handler: next.Handler}).SplitHandler()
		handler := n.handlers[name]
		// The members count every few seconds, so they may not have counted the message yet.
		if handler == nil {
			continue
		}

		handler.Reason = cmp.Or(handler.Reason, next.Reason)
		// A handler that is stopped does not try the message when it is due.
		if due := inUTC(&next.Due); handler.Suspended+handler.Paused == 0 && compareFirst(due, handler.Until) < 0 {
			handler.Until = due
		}
	}
}

// ownTopics returns the topics that the owners of the watcher have reported.
func (g Groups) ownTopics(ctx context.Context) (map[string]bool, error) {
	reports, err := g.op.Activity().openHistory().ReadActivity(ctx, g.op.Watcher)
	own := map[string]bool{}
	for i := range reports {
		for k := range reports[i].Topics {
			own[reports[i].Topics[k].Topic] = true
		}
	}
	return own, err
}

// newGroup joins the two views of a group. notes may be nil.
func newGroup(kafkaGroup *connect.Group, ends map[record.TopicPartition]int64, notes *groupNotes) Group {
	group := Group{
		Group: kafkaGroup.Name, State: kafkaGroup.State, Topics: []string{}, Members: []GroupMember{}, Partitions: []GroupPartition{}, Handlers: []GroupHandler{},
		Problem: kafkaGroup.Problem,
	}

	if kafkaGroup.Committed != nil {
		group.Lag = new(int64)
	}
	readers := map[record.TopicPartition]string{}
	for i := range kafkaGroup.Members {
		member := &kafkaGroup.Members[i]
		group.Members = append(group.Members, GroupMember{member.ID, member.Instance, member.ClientID, strings.TrimPrefix(member.Host, "/"), len(member.Assigned)})
		if len(member.Assigned) == 0 {
			group.Idle++
		}
		for _, tp := range member.Assigned {
			readers[tp] = member.ID
		}
	}

	all := map[record.TopicPartition]bool{}
	for tp := range readers {
		all[tp] = true
	}
	for tp := range kafkaGroup.Committed {
		all[tp] = true
	}
	for tp := range all {
		partition := GroupPartition{Topic: tp.Topic, Partition: tp.Partition, Member: readers[tp]}
		if committed, ok := kafkaGroup.Committed[tp]; ok {
			partition.Committed = &committed
		}
		if end, ok := ends[tp]; ok {
			partition.End = &end
		}
		group.addPartition(partition)
	}

	slices.Sort(group.Topics)
	slices.SortFunc(group.Members, func(a, b GroupMember) int { return strings.Compare(a.ID, b.ID) })
	slices.SortFunc(group.Partitions, func(a, b GroupPartition) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	if notes != nil {
		group.Paused = notes.paused
		for _, h := range notes.handlers {
			group.Handlers = append(group.Handlers, *h)
		}
		slices.SortFunc(group.Handlers, func(a, b GroupHandler) int { return strings.Compare(a.Handler, b.Handler) })
	}
	return group
}

// knownLag returns the lag, or -1 if it is unknown.
func (g *Group) knownLag() int64 {
	if g.Lag == nil {
		return -1
	}
	return *g.Lag
}

// addPartition adds a partition and its lag.
func (g *Group) addPartition(partition GroupPartition) {
	if partition.Committed != nil && partition.End != nil {
		lag := max(*partition.End-*partition.Committed, 0)
		partition.Lag = &lag
		if _, rung := transport.ParseRetryTopic(partition.Topic, g.Group); rung > 0 {
			g.Retrying += lag
		} else {
			*g.Lag += lag
		}
	}

	// The group of a topic that was deleted keeps its offsets for a while. Without a state, the members are unknown.
	if g.State != "" && partition.Member == "" && partition.End != nil {
		g.Unassigned++
	}
	if !slices.Contains(g.Topics, partition.Topic) {
		g.Topics = append(g.Topics, partition.Topic)
	}
	g.Partitions = append(g.Partitions, partition)
}
