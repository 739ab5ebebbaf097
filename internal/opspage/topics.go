package opspage

func showTopics(c *call) (any, error) { return c.use.Operator.Topics(c.ctx) }

func showRecent(c *call) (any, error) { return c.use.Operator.Recent(c.ctx, c.value("topic")) }
