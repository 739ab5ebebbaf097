package opspage

func showTopics(c *call) (any, error) { return c.use.Activity.Topics(c.ctx) }

func showRecent(c *call) (any, error) { return c.use.Activity.Recent(c.ctx, c.value("topic")) }
