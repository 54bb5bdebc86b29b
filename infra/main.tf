# Two hosts in one subnet of one zone, reached over SSH from one address.

locals {
  types     = { client = var.client_type, server = var.server_type }
  addresses = { client = "10.0.0.10", server = "10.0.0.11" }
  # Families of ARM processors bear a g after their generation: c7g, m7gd, c8gn.
  architectures = {
    for host, type in local.types : host => can(regex("^[a-z]+[0-9]+g", type)) ? "arm64" : "x86_64"
  }
  # Not every zone has every type.
  zones = sort(setintersection([for each in data.aws_ec2_instance_type_offerings.host : each.locations]...))
}

data "aws_ec2_instance_type_offerings" "host" {
  for_each      = local.types
  location_type = "availability-zone"
  filter {
    name   = "instance-type"
    values = [each.value]
  }
}

resource "aws_vpc" "run" {
  cidr_block = "10.0.0.0/24"
  tags       = { Name = "pqtail-${var.run}" }
}

resource "aws_internet_gateway" "run" {
  vpc_id = aws_vpc.run.id
  tags   = { Name = "pqtail-${var.run}" }
}

resource "aws_subnet" "run" {
  vpc_id            = aws_vpc.run.id
  cidr_block        = aws_vpc.run.cidr_block
  availability_zone = var.zone == "" ? local.zones[0] : var.zone
  tags              = { Name = "pqtail-${var.run}" }
}

resource "aws_route_table" "run" {
  vpc_id = aws_vpc.run.id
  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.run.id
  }
  tags = { Name = "pqtail-${var.run}" }
}

resource "aws_route_table_association" "run" {
  subnet_id      = aws_subnet.run.id
  route_table_id = aws_route_table.run.id
}

resource "aws_security_group" "run" {
  name        = "pqtail-${var.run}"
  description = "SSH from one address, everything between the two hosts"
  vpc_id      = aws_vpc.run.id
  tags        = { Name = "pqtail-${var.run}" }

  ingress {
    description = "SSH from whoever runs this"
    from_port   = 22
    to_port     = 22
    protocol    = "tcp"
    cidr_blocks = [var.allow_cidr]
  }
  ingress {
    description = "Between the hosts"
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    self        = true
  }
  egress {
    description = "Packages and sources"
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    cidr_blocks = ["0.0.0.0/0"]
  }
}

resource "aws_key_pair" "run" {
  key_name   = "pqtail-${var.run}"
  public_key = var.public_key
}

resource "aws_placement_group" "run" {
  count    = var.placement_group ? 1 : 0
  name     = "pqtail-${var.run}"
  strategy = "cluster"
}

# Ubuntu's own account is 099720109477. A mock cloud offers what images it offers.
data "aws_ami" "ubuntu" {
  for_each    = toset(values(local.architectures))
  most_recent = true
  owners      = ["099720109477"]
  filter {
    name   = "name"
    values = [var.mock_endpoint == "" ? "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-*-server-*" : "ubuntu/images/*"]
  }
  dynamic "filter" {
    for_each = var.mock_endpoint == "" ? [each.value] : []
    content {
      name   = "architecture"
      values = [filter.value]
    }
  }
}

resource "aws_instance" "host" {
  for_each      = local.types
  ami           = data.aws_ami.ubuntu[local.architectures[each.key]].id
  instance_type = each.value

  subnet_id                   = aws_subnet.run.id
  private_ip                  = local.addresses[each.key]
  associate_public_ip_address = true
  vpc_security_group_ids      = [aws_security_group.run.id]
  key_name                    = aws_key_pair.run.key_name
  placement_group             = one(aws_placement_group.run[*].name)

  # The dead-man's switch powers off, and that is to end the costs.
  instance_initiated_shutdown_behavior = "terminate"

  user_data_base64 = base64gzip(templatefile("${path.module}/cloud-init.yaml", {
    ttl_minutes = var.ttl_minutes
  }))

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type           = "gp3"
    volume_size           = 20
    encrypted             = true
    delete_on_termination = true
    tags                  = merge(local.tags, { Name = "pqtail-${var.run}-${each.key}" })
  }

  dynamic "instance_market_options" {
    for_each = var.spot ? [1] : []
    content {
      market_type = "spot"
      spot_options {
        spot_instance_type             = "one-time"
        instance_interruption_behavior = "terminate"
      }
    }
  }

  tags = { Name = "pqtail-${var.run}-${each.key}" }

  # The way to the packages must be there when cloud-init runs.
  depends_on = [aws_route_table_association.run]
}
