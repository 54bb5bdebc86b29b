# Asks the provider, and no state file, what still bears a run's tags. It makes nothing.

terraform {
  required_version = ">= 1.11"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
    }
  }
}

variable "run" {
  description = "Value of the tag `run`."
  type        = string
}

variable "region" {
  description = "Region of the provider."
  type        = string
}

variable "mock_endpoint" {
  description = "URL of a mock cloud that takes the provider's place; empty: the real one."
  type        = string
  default     = ""
}

provider "aws" {
  region                      = var.region
  access_key                  = var.mock_endpoint == "" ? null : "mock"
  secret_key                  = var.mock_endpoint == "" ? null : "mock"
  skip_credentials_validation = var.mock_endpoint != ""
  skip_metadata_api_check     = var.mock_endpoint == "" ? null : "true"
  skip_requesting_account_id  = var.mock_endpoint != ""
  max_retries                 = var.mock_endpoint == "" ? null : 2

  dynamic "endpoints" {
    for_each = var.mock_endpoint == "" ? [] : [var.mock_endpoint]
    content {
      ec2 = endpoints.value
      sts = endpoints.value
    }
  }
}

locals {
  tags = { project = "pqtail", run = var.run }
}

data "aws_instances" "left" {
  instance_tags = local.tags
  # Terminated ones stay listed for an hour and cost nothing.
  instance_state_names = ["pending", "running", "shutting-down", "stopping", "stopped"]
}

data "aws_ebs_volumes" "left" {
  tags = local.tags
}

data "aws_vpcs" "left" {
  tags = local.tags
}

data "aws_subnets" "left" {
  tags = local.tags
}

data "aws_security_groups" "left" {
  tags = local.tags
}

data "aws_route_tables" "left" {
  tags = local.tags
}

# For gateways, key pairs and placement groups the provider has no data source that may find none. A gateway goes before its
# VPC can; the other two cost nothing, and their removal is told by `terraform destroy` alone.

output "left" {
  description = "Identifiers by kind; all lists empty when nothing is left."
  value = {
    instances       = data.aws_instances.left.ids
    volumes         = data.aws_ebs_volumes.left.ids
    VPCs            = data.aws_vpcs.left.ids
    subnets         = data.aws_subnets.left.ids
    security_groups = data.aws_security_groups.left.ids
    route_tables    = data.aws_route_tables.left.ids
  }
}
