package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// The tasks of a process.
const (
	TaskRelay   = "relay"
	TaskCleaner = "cleaner"
	TaskAdmin   = "admin"
)

var allTasks = []string{TaskRelay, TaskCleaner, TaskAdmin}

// HasTask reports whether the process has the task.
func (c *Config) HasTask(task string) bool { return slices.Contains(c.Tasks, task) }

func (c *Config) validateTasks(validator validator) {
	allKnown := true
	for i, r := range c.Tasks {
		known := slices.Contains(allTasks, r)
		allKnown = allKnown && known
		validator.check(fmt.Sprintf("tasks[%d]", i), known, strconv.Quote(r), forms["task"].expected)
	}

	// If a task is unknown, that problem is enough.
	serves := c.HasTask(TaskAdmin) && c.HTTP.Admin != nil
	hasWork := len(c.Tasks) > 0 && (c.HasTask(TaskRelay) || serves)
	validator.check("tasks", !allKnown || hasWork, "["+strings.Join(c.Tasks, ", ")+"]",
		"expected relay, or admin together with http.admin; otherwise this process has nothing to do")
}
