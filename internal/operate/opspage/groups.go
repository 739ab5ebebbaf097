package opspage

import (
	"github.com/outrelay/outrelay/internal/operate/admin"
)

// groups is the data of the page of consumer groups: all of them, or one with its partitions.
type groups struct {
	admin.GroupList
	One *admin.Group
}

// showGroups connects to Kafka, so the script does not refresh the page.
func showGroups(call *call) (any, error) {
	if name := call.value("group"); name != "" {
		one, err := call.use.Groups.Show(call.ctx, name)
		return groups{One: &one}, err
	}
	list, err := call.use.Groups.List(call.ctx, call.isSet("all"))
	return groups{GroupList: list}, call.ignoreFirstRun(err)
}
