package connect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

const (
	// maxGroups bounds the groups that ReadGroups reads.
	maxGroups = 500
	// groupCalls is the number of groups that are read at the same time.
	groupCalls = 8
)

// Group is a consumer group as Kafka has it. Its State is "" if its members cannot be read.
type Group struct {
	Name string
	kafkawire.GroupState
	Committed map[record.TopicPartition]int64 // nil if it cannot be read
	// Problem is a sentence about what cannot be read, or "".
	Problem string
}

// Groups are consumer groups, with the ends of the partitions that they read.
type Groups struct {
	Groups []Group
	Ends   map[record.TopicPartition]int64 // a partition is missing if its end cannot be read
	// Problems are sentences about what cannot be read of all groups.
	Problems []string
}

// GroupQuery selects consumer groups.
type GroupQuery struct {
	Names []string
	All   bool // also each group that the login may list
}

// ReadGroups reads the groups that query selects, at most maxGroups. A group that the login may not see, and a broker that does not
// respond, is a sentence in the result. The error is that no broker responds.
func (c Cluster) ReadGroups(ctx context.Context, query GroupQuery) (Groups, error) {
	out := Groups{Ends: map[record.TopicPartition]int64{}}
	client, err := c.open()
	if err != nil {
		return out, err
	}
	defer client.Close()

	names := slices.Clone(query.Names)
	if query.All {
		listed, err := client.GroupNames(ctx)
		if errors.Is(err, kafkawire.ErrAway) {
			return out, err
		}
		if err != nil {
			out.Problems = append(out.Problems, err.Error())
		}
		names = append(names, listed...)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	if len(names) > maxGroups {
		out.Problems = append(out.Problems, fmt.Sprintf("there are %d groups; only the first %d are read: name the group", len(names), maxGroups))
		names = names[:maxGroups]
	}

	out.Groups = make([]Group, len(names))
	reading, groupCtx := errgroup.WithContext(ctx)
	reading.SetLimit(groupCalls)
	for i, name := range names {
		reading.Go(func() (err error) {
			out.Groups[i], err = readGroup(groupCtx, client, name)
			return err
		})
	}
	if err := cmp.Or(reading.Wait(), ctx.Err()); err != nil {
		return out, err
	}
	return out, out.readEnds(ctx, client)
}

// readGroup reads one group from its coordinator. The error is that no broker responds.
func readGroup(ctx context.Context, client *kafkawire.Client, name string) (Group, error) {
	group := Group{Name: name}
	at, err := client.FindGroupCoordinator(ctx, name)
	if errors.Is(err, kafkawire.ErrAway) {
		return group, err
	}
	if err != nil {
		group.Problem = describeGroupProblem(name, "find", err)
		return group, nil
	}

	group.GroupState, err = client.DescribeGroup(ctx, at, name)
	if err != nil {
		group.Problem = describeGroupProblem(name, "describe", err)
	}
	committed, err := client.CommittedOffsets(ctx, at, name, nil)
	if err != nil {
		group.Problem = cmp.Or(group.Problem, describeGroupProblem(name, "read the offsets of", err))
		return group, nil
	}
	group.Committed = make(map[record.TopicPartition]int64, len(committed))
	for tp, offset := range committed {
		group.Committed[tp] = offset.Offset
	}
	return group, nil
}

// describeGroupProblem returns a sentence about a group that cannot be read.
func describeGroupProblem(name, verb string, err error) string {
	if errors.Is(err, kafkawire.GroupAuthorizationFailed) {
		return fmt.Sprintf("the Kafka login of the relay may not see group %s: grant it DESCRIBE on the group", name)
	}
	if _, isCode := errors.AsType[kafkawire.Code](err); isCode && kafkawire.IsRetriable(err) {
		return fmt.Sprintf("Kafka has no coordinator that can %s group %s at the moment, for example before the first group of the cluster: "+
			"repeat it in a few seconds", verb, name)
	}
	return fmt.Sprintf("cannot %s group %s in Kafka: %v", verb, name, err)
}

// readEnds reads the ends of all partitions that the groups read.
func (g *Groups) readEnds(ctx context.Context, client *kafkawire.Client) error {
	wanted := map[record.TopicPartition]bool{}
	for i := range g.Groups {
		for tp := range g.Groups[i].Committed {
			wanted[tp] = true
		}
		for k := range g.Groups[i].Members {
			for _, tp := range g.Groups[i].Members[k].Assigned {
				wanted[tp] = true
			}
		}
	}
	if len(wanted) == 0 {
		return nil
	}

	var topics []string
	for tp := range wanted {
		topics = append(topics, tp.Topic)
	}
	slices.Sort(topics)
	layout, err := client.Metadata(ctx, slices.Compact(topics))
	if err != nil {
		return err
	}

	byLeader := map[string][]record.TopicPartition{}
	for tp := range wanted {
		// A topic that was deleted, or that the login may not describe, has no end.
		if addr := layout.LeaderAddr(tp); addr != "" {
			byLeader[addr] = append(byLeader[addr], tp)
		}
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for addr, list := range byLeader {
		wg.Go(func() {
			ends, err := client.LeaderOffsets(ctx, addr, list, kafkawire.LogEnd)
			mu.Lock()
			defer mu.Unlock()
			for tp, end := range ends {
				g.Ends[tp] = end.Offset
			}
			if err != nil {
				g.Problems = append(g.Problems, fmt.Sprintf("cannot read the ends of %d of the partitions that broker %s leads: %v", len(list)-len(ends), addr, err))
			}
		})
	}
	wg.Wait()
	return nil
}
